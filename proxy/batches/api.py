"""HTTP handlers of `/v1/files` and `/v1/batches` on the client port."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable

import orjson

from proxy.batches import request_parsing
from proxy.batches.request_parsing import RefusedRequestError
from proxy.batches.scheduler import BatchScheduler
from proxy.batches.schemas import batch_json, file_json, list_json
from proxy.batches.storage.store import Store
from proxy.batches.storage.store_thread import StoreThread
from proxy.batches.types import (
    INPUT,
    DiskError,
    File,
    InUseError,
    Json,
    StoreFullError,
    TenantLimitError,
)
from proxy.config.batches import BatchesConfig
from proxy.core.lifecycle import billing
from proxy.core.model import refusals
from proxy.core.model.finished_request import FinishedRequest
from proxy.core.model.refusals import RefusedError
from proxy.core.model.route_table import OWN, Route
from proxy.core.model.types import Reason, Refusal
from proxy.http.headers import status_line
from proxy.http.local_responses import refuse, respond
from proxy.http.request import Request, RequestHead
from proxy.metrics.registry import CLIENT_GONE
from proxy.wire.extension import Client
from proxy.wire.server import WireServer

logger = logging.getLogger(__name__)

MAX_REQUESTS_PER_TENANT = 64  # at once; all tenants share the store's thread
RETRY_AFTER_S = 1.0
DISK_RETRY_AFTER_S = 5.0
DISK_LOG_S = 60.0
FILES, BATCHES = OWN["files"], OWN["batches"]
PATH = re.compile(r"/v1/(files|batches)(?:/([A-Za-z0-9_-]{1,200})(?:/(content|cancel))?)?")
UPLOADS = "/v1/files"
# Methods by noun, whether the path has an id, and action.
METHODS = {
    ("files", False, None): ("GET", "POST"),
    ("files", True, None): ("GET", "DELETE"),
    ("files", True, "content"): ("GET",),
    ("batches", False, None): ("GET", "POST"),
    ("batches", True, None): ("GET",),
    ("batches", True, "cancel"): ("POST",),
}


class BatchApi:
    """The Files and Batches API of one router process."""

    def __init__(
        self,
        wire: WireServer,
        store: StoreThread,
        scheduler: BatchScheduler,
        settings: BatchesConfig,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.wire = wire
        self.store = store
        self.scheduler = scheduler
        self.settings = settings
        self.wall = wall
        self.in_progress: Counter[str] = Counter()  # requests by tenant
        self._logged_disk_error = "", -math.inf  # the text and the time

    def log_disk_error(self, error: DiskError) -> None:
        """Log an error, the same at most once in `DISK_LOG_S`: clients repeat their requests."""
        text, now = str(error), self.wire.clock()
        logged, logged_at = self._logged_disk_error
        if text != logged or now - logged_at >= DISK_LOG_S:
            self._logged_disk_error = text, now
            logger.error("batches: refused: %s", text)

    def find(self, head: RequestHead) -> Route | Refusal | None:
        """Return the route of a request, a refusal, or None for other paths."""
        match = PATH.fullmatch(head.path)
        if match is None:
            return None
        methods = METHODS.get((match[1], match[2] is not None, match[3]))
        if methods is None:
            return None
        if head.method not in methods:
            return refusals.wrong_method(head.path, head.method, methods)
        return FILES if match[1] == "files" else BATCHES

    def begin(self, client: Client, request: Request) -> BatchApiRequest:
        return BatchApiRequest(self, client, request)


class BatchApiRequest:
    def __init__(self, api: BatchApi, client: Client, request: Request) -> None:
        self._api = api
        self._client = client
        self._request = request
        tenant = self._charged = request.head.tenant
        self._entered = False  # counted in `in_progress`
        self._tenant = "" if tenant is None else tenant.name
        self._keep_alive = request.head.keep_alive
        self._begun = False  # part of the response is sent
        self._writable = asyncio.Event()
        self._writable.set()
        self._task: asyncio.Task[None] | None = None
        self._began = 0.0
        self._held_bytes = 0  # bytes of the body, in memory until the store has them
        self._sent = 0  # response bytes
        self._budget_account: str | None = None  # the tenant's account in the body budget

    def start(self, now: float) -> None:
        self._began = now
        if self._request.head.method != "POST":
            self._request.body = b""  # free the unused body
        refusal = self._admit(now)
        self._api.wire.local_requests.add(self)
        self._task = asyncio.get_running_loop().create_task(self._run(refusal))
        self._task.add_done_callback(self._release)

    def _admit(self, now: float) -> Refusal | None:
        """Count the request and its body, or refuse them.

        Requests that change something also count against the tenant's rate limits.
        """
        in_progress = self._api.in_progress
        if in_progress[self._tenant] >= MAX_REQUESTS_PER_TENANT:
            message = (
                f"You have {MAX_REQUESTS_PER_TENANT} file and batch requests in progress. "
                "Retry later."
            )
            code = "rate_limit_exceeded"
            return Refusal(429, Reason.LIMITED, message, code, retry_after_s=RETRY_AFTER_S)
        if self._request.head.method == "GET":
            self._charged = None
        if (
            self._charged is not None
            and (refusal := billing.enter_without_worker(self._charged, now)) is not None
        ):
            return refusal
        self._entered = True
        in_progress[self._tenant] += 1
        budget, size = self._api.wire.body_budget, len(self._request.body)
        self._budget_account = budget.account(self._request.head.tenant)
        try:
            budget.reserve(size, self._budget_account)
        except RefusedError as error:
            return error.refusal
        self._held_bytes = size
        return None

    def _release(self, _: object) -> None:
        self._task = None  # a cancelled task's traceback keeps the body alive
        self._api.wire.body_budget.release(self._held_bytes, self._budget_account)

    def _finish(self) -> None:
        wire = self._api.wire
        wire.remove_local_request(self)
        if self._entered:
            self._entered = False
            self._api.in_progress[self._tenant] -= 1
            if self._charged is not None:
                billing.leave_without_worker(self._charged, wire.clock())

    def pause(self) -> None:
        """Stop writing; the client's buffer is full."""
        self._writable.clear()

    def resume(self, now: float) -> None:  # noqa: ARG002
        self._writable.set()

    def client_left(self, now: float) -> None:  # noqa: ARG002
        """Stop; the store may have done the operation already."""
        self._count(CLIENT_GONE)
        self._stop()

    def end_for_shutdown(self, now: float) -> None:  # noqa: ARG002
        self._stop()
        self._keep_alive = False
        self._refuse(refusals.draining())

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._finish()

    async def _run(self, refusal: Refusal | None) -> None:
        if refusal is not None:
            self._refuse(refusal)
            return
        try:
            body = await self._execute()
        except RefusedRequestError as error:
            self._refuse(error.refusal)
        except InUseError as error:
            self._refuse(RefusedRequestError(409, str(error), "file_id").refusal)
        except TenantLimitError as error:
            status, code = (429, "rate_limit_exceeded") if error.later else (413, "storage_limit")
            self._refuse(RefusedRequestError(status, str(error), code=code).refusal)
        except DiskError as error:
            self._api.log_disk_error(error)
            self._refuse(_disk_refusal(error))
        except Exception:
            logger.exception("batches: %s %s", self._request.head.method, self._request.head.path)
            message = "Internal error; the router's log has the details."
            self._refuse(RefusedRequestError(500, message).refusal)
        else:
            if body is not None:
                headers = [(b"X-Request-Id", self._request.id)]
                data = respond(200, body, headers=headers, keep_alive=self._is_kept_alive)
                self._respond(200, data)

    @property
    def _is_kept_alive(self) -> bool:
        return self._keep_alive and not self._api.wire.leaving

    def _count(self, status: int, reason: Reason = Reason.OWN) -> None:
        noun = FILES if self._request.head.path.startswith(UPLOADS) else BATCHES
        wire = self._api.wire
        finished = FinishedRequest(noun.name, status, reason, wire.clock() - self._began)
        wire.count_answered(finished, self._request, self._sent)

    def _refuse(self, refusal: Refusal) -> None:
        if self._begun:
            self._count(refusal.status, refusal.reason)
            self._finish()
            self._client.break_off()
            return
        data = refuse(refusal, self._request, keep_alive=self._is_kept_alive)
        self._respond(refusal.status, data, refusal.reason)

    def _respond(self, status: int, data: bytes, reason: Reason = Reason.OWN) -> None:
        self._finish()
        self._write(data)
        self._count(status, reason)
        self._client.end_response(self._api.wire.clock(), keep_alive=self._is_kept_alive)

    def _write(self, data: bytes) -> None:
        self._sent += len(data)
        self._client.write(data)

    async def _execute(self) -> bytes | None:
        """Return the response body, or None if the response is already written."""
        head = self._request.head
        match = PATH.fullmatch(head.path)
        noun, name, action = match.groups() if match else ("", "", "")
        if name is None:
            return await self._serve_collection(noun)
        if noun == "files":
            return await self._serve_file(name, action)
        return await self._serve_batch(name, action)

    async def _serve_collection(self, noun: str) -> bytes:
        if self._request.head.method == "POST":
            create = self._create_file if noun == "files" else self._create_batch
            return orjson.dumps(await create())
        store = self._api.store
        page, purpose = request_parsing.parse_page(self._request, of_files=noun == "files")
        if page.after is not None:
            find = Store.file if noun == "files" else Store.batch
            if await store(find, self._tenant, page.after) is None:
                message = (
                    f"{page.after[:200]!r}: 'after' must be an object of the list. If it was "
                    "deleted, list again without 'after'."
                )
                raise RefusedRequestError(400, message, "after")
        if noun == "files":
            files = await store(Store.files, self._tenant, page, purpose)
            return list_json([file_json(item) for item in files], page.limit)
        batches = await store(Store.batches, self._tenant, page)
        return list_json([batch_json(item) for item in batches], page.limit)

    async def _create_file(self) -> Json:
        api = self._api
        name, content, keep_s = request_parsing.parse_upload(self._request, api.settings)
        self._request.body = b""
        now = api.wall()
        return file_json(
            await api.store(Store.add_file, self._tenant, name, INPUT, content, now, keep_s)
        )

    async def _create_batch(self) -> Json:
        api = self._api
        batch = request_parsing.parse_batch(self._request, self._tenant, api.settings, api.wall())
        file = await self._find_file(batch.input)
        if file.purpose != INPUT:
            message = f"{file.id} has the purpose {file.purpose!r}; it must be 'batch'."
            raise RefusedRequestError(400, message, "input_file_id")
        await api.store(Store.add_batch, batch)
        api.scheduler.wake()
        return batch_json(batch)

    async def _find_file(self, file_id: str) -> File:
        file = await self._api.store(Store.file, self._tenant, file_id)
        if file is None:
            raise RefusedRequestError(404, f"No such File object: {file_id[:200]}", "id")
        return file

    async def _serve_file(self, file_id: str, action: str | None) -> bytes | None:
        file = await self._find_file(file_id)
        if action is not None:
            await self._send_content(file)
            return None
        if self._request.head.method == "DELETE":
            store, last = self._api.store, 0
            while (after := await store(Store.delete_results_after, file, last)) is not None:
                last = after
            deleted = await store(Store.delete_file, self._tenant, file_id)
            return orjson.dumps({"id": file_id, "object": "file", "deleted": deleted})
        return orjson.dumps(file_json(file))

    async def _serve_batch(self, batch_id: str, action: str | None) -> bytes:
        api = self._api
        if action is None:
            batch = await api.store(Store.batch, self._tenant, batch_id)
        else:
            batch = await api.store(Store.cancel_batch, self._tenant, batch_id, api.wall())
            api.scheduler.wake()
        if batch is None:
            raise RefusedRequestError(404, f"No batch found with id '{batch_id}'.", "id")
        if action is not None and not batch.active:
            message = f"Cannot cancel a batch with status '{batch.status}'."
            raise RefusedRequestError(409, message)
        return orjson.dumps(batch_json(batch))

    async def _send_content(self, file: File) -> None:
        wire = self._api.wire
        head = [status_line(200), b"X-Request-Id: ", self._request.id, b"\r\n"]
        head.append(b"Content-Type: application/jsonl\r\nContent-Length: %d\r\n" % file.bytes)
        keep_alive, left, at = self._is_kept_alive, file.bytes, 0
        head.append(b"Connection: %b\r\n\r\n" % (b"keep-alive" if keep_alive else b"close"))
        while left > 0:
            piece, at = await self._api.store(Store.read_piece, file, at)
            if not piece or len(piece) > left:
                raise RefusedRequestError(404, f"{file.id} no longer exists", "id")
            left -= len(piece)
            if not self._begun:
                self._begun = True
                piece = b"".join((*head, piece))
            self._write(piece)
            if not self._client.writable:
                self._writable.clear()
            await self._writable.wait()
        self._count(200)
        self._finish()
        self._client.end_response(wire.clock(), keep_alive=keep_alive)


def _disk_refusal(error: DiskError) -> Refusal:
    if isinstance(error, StoreFullError):
        message = "The router's disk is full. The operator must free space."
        return Refusal(507, Reason.OWN, message, "insufficient_storage")
    message = "The router cannot access its files and batches. Retry later."
    return Refusal(
        503, Reason.OWN, message, "storage_unavailable", retry_after_s=DISK_RETRY_AFTER_S
    )

"""`/v1/files` and `/v1/batches` on the clients' port."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import orjson

from proxy.batches import request_parsing
from proxy.batches.request_parsing import RefusedRequestError
from proxy.batches.schemas import batch_shown, file_shown, listed
from proxy.batches.storage.store import Store
from proxy.batches.types import (
    INPUT,
    DiskError,
    File,
    InUseError,
    Json,
    StoreFullError,
    TenantLimitError,
)
from proxy.core.lifecycle import billing
from proxy.core.model import refusals
from proxy.core.model.route_table import OWN, Route
from proxy.core.model.types import Reason, Refusal
from proxy.http.headers import RefusedError, status_line
from proxy.http.local_responses import answer, refuse
from proxy.metrics.registry import CLIENT_GONE

if TYPE_CHECKING:
    from proxy.batches.scheduler import BatchScheduler
    from proxy.batches.storage.store_thread import StoreThread
    from proxy.config.batches import BatchesConfig
    from proxy.http.request import Request, RequestHead
    from proxy.wire.extension import Client
    from proxy.wire.server import WireServer

logger = logging.getLogger(__name__)

MOST_VISITS = 64  # of one tenant at once: they share the store's thread with all others
AGAIN_S = 1.0
DISK_AGAIN_S = 5.0
FILES, BATCHES = OWN["files"], OWN["batches"]
PATH = re.compile(r"/v1/(files|batches)(?:/([A-Za-z0-9_-]{1,200})(?:/(content|cancel))?)?")
UPLOADS = "/v1/files"
# What may be asked, by noun, whether one is named, and what of it.
METHODS = {
    ("files", False, None): ("GET", "POST"),
    ("files", True, None): ("GET", "DELETE"),
    ("files", True, "content"): ("GET",),
    ("batches", False, None): ("GET", "POST"),
    ("batches", True, None): ("GET",),
    ("batches", True, "cancel"): ("POST",),
}


class BatchApi:
    """Takes files and batches in, and tells of them."""

    def __init__(
        self,
        wire: WireServer,
        keeper: StoreThread,
        lane: BatchScheduler,
        settings: BatchesConfig,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.wire = wire
        self.keep = keeper
        self.lane = lane
        self.settings = settings
        self.wall = wall
        self.visits: Counter[str] = Counter()  # under way, by tenant

    def find(self, head: RequestHead) -> Route | Refusal | None:
        """Name the route of a request; None if it is none of these."""
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
        """Answer a request for one of these routes."""
        return BatchApiRequest(self, client, request)


class BatchApiRequest:
    """One request to the desk. What it waits for is the store's thread, or a slow reader."""

    def __init__(self, desk: BatchApi, client: Client, request: Request) -> None:
        self._desk = desk
        self._client = client
        self._request = request
        tenant = self._whose = request.head.tenant
        self._entered = False  # among what its tenant may have at once
        self._tenant = "" if tenant is None else tenant.name
        self._keep_alive = request.head.keep_alive
        self._begun = False  # the client has part of the answer
        self._flows = asyncio.Event()
        self._flows.set()
        self._task: asyncio.Task[None] | None = None
        self._began = 0.0
        self._held = 0  # bytes of the body, which lie in memory until the store has them
        self._sent = 0  # bytes
        self._part: str | None = None  # of what is held, in which they are counted

    def start(self, now: float) -> None:
        """Begin."""
        self._began = now
        if self._request.head.method != "POST":
            self._request.body = b""  # nobody reads it
        refusal = self._enter(now)
        self._desk.wire.visits.add(self)
        self._task = asyncio.get_running_loop().create_task(self._run(refusal))
        self._task.add_done_callback(self._give)

    def _enter(self, now: float) -> Refusal | None:
        """Count it, unless there are too many; what changes something as any request."""
        visits = self._desk.visits
        if visits[self._tenant] >= MOST_VISITS:
            message = f"{MOST_VISITS} requests of yours for files and batches are under way."
            code = "rate_limit_exceeded"
            return Refusal(429, Reason.LIMITED, message, code, retry_after_s=AGAIN_S)
        if self._request.head.method == "GET":
            self._whose = None
        if (
            self._whose is not None
            and (refusal := billing.enter_without_worker(self._whose, now)) is not None
        ):
            return refusal
        self._entered = True
        visits[self._tenant] += 1
        collecting, size = self._desk.wire.collecting, len(self._request.body)
        self._part = collecting.account(self._request.head.tenant)
        try:
            collecting.take(size, self._part)
        except RefusedError as error:
            return error.refusal
        self._held = size
        return None

    def _give(self, _: object) -> None:
        self._task = None  # one that was cancelled has all it held in its traceback
        self._desk.wire.collecting.give(self._held, self._part)

    def _over(self) -> None:
        wire = self._desk.wire
        wire.visit_over(self)
        if self._entered:
            self._entered = False
            self._desk.visits[self._tenant] -= 1
            if self._whose is not None:
                billing.leave_without_worker(self._whose, wire.clock())

    def pause(self) -> None:
        """Write no more for now."""
        self._flows.clear()

    def resume(self, now: float) -> None:  # noqa: ARG002
        """Go on."""
        self._flows.set()

    def gone(self, now: float) -> None:  # noqa: ARG002
        """Hear that nobody wants the answer any more; what was asked for may have been done."""
        self._count(CLIENT_GONE)
        self._stop()

    def cut(self, now: float) -> None:
        """End it, because the router does."""
        self._stop()
        if self._begun:
            self._count(503, Reason.DRAINING)
            self._client.break_off()
            return
        self._write(refuse(refusals.draining(), self._request, keep_alive=False))
        self._count(503, Reason.DRAINING)
        self._client.done(now, keep_alive=False)

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._over()

    async def _run(self, refusal: Refusal | None) -> None:
        if refusal is not None:
            self._refuse(refusal)
            return
        try:
            body = await self._do()
        except RefusedRequestError as error:
            self._refuse(error.refusal)
        except InUseError as error:
            self._refuse(RefusedRequestError(409, str(error), "file_id").refusal)
        except TenantLimitError as error:
            status, code = (429, "rate_limit_exceeded") if error.later else (413, "storage_limit")
            self._refuse(RefusedRequestError(status, str(error), code=code).refusal)
        except DiskError as error:
            logger.error("batches: refused: %s", error)
            self._refuse(_disk_refusal(error))
        except Exception:
            logger.exception("batches: %s %s", self._request.head.method, self._request.head.path)
            message = "The router failed to do this; its log says why."
            self._refuse(RefusedRequestError(500, message).refusal)
        else:
            if body is not None:
                self._end(200, answer(200, body, headers=self._headers, keep_alive=self._keeps))

    @property
    def _keeps(self) -> bool:
        return self._keep_alive and not self._desk.wire.leaving

    @property
    def _headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"X-Request-Id", self._request.id)]

    def _count(self, status: int, reason: Reason = Reason.OWN) -> None:
        noun = FILES if self._request.head.path.startswith(UPLOADS) else BATCHES
        wire = self._desk.wire
        wire.answered(noun.name, status, reason, self._request, self._began, self._sent)

    def _refuse(self, refusal: Refusal) -> None:
        if self._begun:
            self._count(refusal.status, refusal.reason)
            self._over()
            self._client.break_off()
            return
        data = refuse(refusal, self._request, keep_alive=self._keeps)
        self._end(refusal.status, data, refusal.reason)

    def _end(self, status: int, data: bytes, reason: Reason = Reason.OWN) -> None:
        self._over()
        self._write(data)
        self._count(status, reason)
        self._client.done(self._desk.wire.clock(), keep_alive=self._keeps)

    def _write(self, data: bytes) -> None:
        self._sent += len(data)
        self._client.write(data)

    async def _do(self) -> bytes | None:
        """Do what is asked; returns the answer's body, None where it is written already."""
        head = self._request.head
        match = PATH.fullmatch(head.path)
        noun, name, action = match.groups() if match else ("", "", "")
        if name is None:
            return await self._all_of(noun)
        if noun == "files":
            return await self._one_file(name, action)
        return await self._one_batch(name, action)

    async def _all_of(self, noun: str) -> bytes:
        if self._request.head.method == "POST":
            making: dict[str, Callable[[], Awaitable[Json]]] = {
                "files": self._take_file,
                "batches": self._take_batch,
            }
            return orjson.dumps(await making[noun]())
        keep = self._desk.keep
        page, purpose = request_parsing.page(self._request, of_files=noun == "files")
        if noun == "files":
            files = await keep(Store.files, self._tenant, page, purpose)
            return listed([file_shown(each) for each in files], page.limit)
        batches = await keep(Store.batches, self._tenant, page)
        return listed([batch_shown(each) for each in batches], page.limit)

    async def _take_file(self) -> Json:
        desk = self._desk
        name, content = request_parsing.upload(self._request, desk.settings)
        self._request.body = b""
        return file_shown(
            await desk.keep(Store.add_file, self._tenant, name, INPUT, content, desk.wall())
        )

    async def _take_batch(self) -> Json:
        desk = self._desk
        batch = request_parsing.new_batch(self._request, self._tenant, desk.settings, desk.wall())
        file = await self._file(batch.input)
        if file.purpose != INPUT:
            message = f"{file.id} has the purpose {file.purpose!r}; upload one for 'batch'."
            raise RefusedRequestError(400, message, "input_file_id")
        await desk.keep(Store.add_batch, batch)
        desk.lane.tell()
        return batch_shown(batch)

    async def _file(self, file_id: str) -> File:
        file = await self._desk.keep(Store.file, self._tenant, file_id)
        if file is None:
            raise RefusedRequestError(404, f"No such File object: {file_id[:200]}", "id")
        return file

    async def _one_file(self, file_id: str, action: str | None) -> bytes | None:
        file = await self._file(file_id)
        if action is not None:
            await self._send(file)
            return None
        if self._request.head.method == "DELETE":
            keep, last = self._desk.keep, 0
            while (after := await keep(Store.empty_file, file, last)) is not None:
                last = after
            gone = await keep(Store.delete_file, self._tenant, file_id)
            return orjson.dumps({"id": file_id, "object": "file", "deleted": gone})
        return orjson.dumps(file_shown(file))

    async def _one_batch(self, batch_id: str, action: str | None) -> bytes:
        desk = self._desk
        if action is None:
            batch = await desk.keep(Store.batch, self._tenant, batch_id)
        else:
            batch = await desk.keep(Store.cancel, self._tenant, batch_id, desk.wall())
            desk.lane.tell()
        if batch is None:
            raise RefusedRequestError(404, f"No batch found with id '{batch_id}'.", "id")
        if action is not None and not batch.active:
            message = f"Cannot cancel a batch with status '{batch.status}'."
            raise RefusedRequestError(409, message)
        return orjson.dumps(batch_shown(batch))

    async def _send(self, file: File) -> None:
        """Write a file's content as fast as the client takes it."""
        wire = self._desk.wire
        head = [status_line(200), b"X-Request-Id: ", self._request.id, b"\r\n"]
        head.append(b"Content-Type: application/jsonl\r\nContent-Length: %d\r\n" % file.bytes)
        head.append(
            b"Connection: keep-alive\r\n\r\n" if self._keeps else b"Connection: close\r\n\r\n"
        )
        keeps, left, at = self._keeps, file.bytes, 0
        while left > 0:
            piece, at = await self._desk.keep(Store.piece, file, at)
            if not piece or len(piece) > left:
                raise RefusedRequestError(404, f"{file.id} is gone", "id")
            left -= len(piece)
            if not self._begun:
                self._begun = True
                piece = b"".join((*head, piece))
            self._write(piece)
            if not self._client.writable:
                self._flows.clear()
            await self._flows.wait()
        self._count(200)
        self._over()
        self._client.done(wire.clock(), keep_alive=keeps)


def _disk_refusal(error: DiskError) -> Refusal:
    """Say that the disk failed; what is wrong with it is for the log."""
    if isinstance(error, StoreFullError):
        message = "The router has no room to keep this. Its operator has to make some."
        return Refusal(507, Reason.OWN, message, "insufficient_storage")
    message = "The router can't reach its folder of files and batches now. Retry later."
    return Refusal(503, Reason.OWN, message, "storage_unavailable", retry_after_s=DISK_AGAIN_S)

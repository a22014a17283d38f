"""Headless Chromium over its DevTools protocol, downloaded where it is not installed."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import aiohttp

from tests.programs import fetched

DEADLINE_S = 60.0
OPTIONS = (
    "--headless",
    "--no-sandbox",  # the sandbox refuses root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
    "--window-size=1280,1500",
)
KEYS = {
    "Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "End": 35, "Home": 36, "ArrowLeft": 37,
    "ArrowRight": 39,
}  # fmt: skip


class Page:
    """A tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.errors: list[str] = []  # errors and warnings of the console
        self._socket = socket
        self._session = ""
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self._listener = asyncio.create_task(self._listen())

    async def open(self) -> None:
        target = await self.call("Target.createTarget", url="about:blank")
        found = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        await self._socket.send_json(message)
        async with asyncio.timeout(DEADLINE_S):
            return await answer

    async def goto(self, url: str) -> None:
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        async with asyncio.timeout(DEADLINE_S):
            await self._loaded.wait()

    async def run(self, script: str) -> Any:
        done = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    async def wait_until(self, script: str) -> Any:
        found = None
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not (found := await self.run(script)):  # noqa: ASYNC110 - there is no event
                    await asyncio.sleep(0.05)
        except TimeoutError:
            text = await self.run("document.body.innerText")
            raise AssertionError(f"not true: {script}\n{text}\n{self.errors}") from None
        return found

    async def press(self, *keys: str) -> None:
        for key in keys:
            parameters = {"key": key, "windowsVirtualKeyCode": KEYS[key]}
            if key in ("Enter", " "):
                parameters["text"] = "\r" if key == "Enter" else " "
            await self.call("Input.dispatchKeyEvent", type="keyDown", **parameters)
            await self.call("Input.dispatchKeyEvent", type="keyUp", **parameters)

    async def prefer(self, **features: str) -> None:
        """Set media preferences, e.g. `color_scheme="dark"`."""
        listed = [
            {"name": f"prefers-{k.replace('_', '-')}", "value": v} for k, v in features.items()
        ]
        await self.call("Emulation.setEmulatedMedia", features=listed)

    async def picture(self, **clip: float) -> bytes:
        parameters = {"clip": {**clip, "scale": 1}, "captureBeyondViewport": True} if clip else {}
        screenshot = await self.call("Page.captureScreenshot", format="png", **parameters)
        return base64.b64decode(screenshot["data"])

    async def _listen(self) -> None:
        async for message in self._socket:
            data = json.loads(message.data)
            if (answer := self._answers.pop(data.get("id", 0), None)) is not None:
                if "error" in data:
                    answer.set_exception(RuntimeError(data["error"]["message"]))
                else:
                    answer.set_result(data["result"])
                continue
            parameters = data.get("params", {})
            match data.get("method"):
                case "Page.loadEventFired":
                    self._loaded.set()
                case "Runtime.exceptionThrown":
                    self.errors.append(json.dumps(parameters["exceptionDetails"]))
                case "Runtime.consoleAPICalled" if parameters["type"] in (
                    "error",
                    "warning",
                    "assert",
                ):
                    self.errors.append(json.dumps(parameters["args"]))
                case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                    self.errors.append(parameters["entry"]["text"])


@asynccontextmanager
async def browser() -> AsyncIterator[Page]:
    chromium = await asyncio.to_thread(fetched, "chromium")
    with tempfile.TemporaryDirectory(
        prefix="vllm-sched-chromium-", ignore_cleanup_errors=True
    ) as folder:
        process = await asyncio.create_subprocess_exec(
            chromium,
            *OPTIONS,
            f"--user-data-dir={folder}",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        assert process.stderr is not None
        try:
            address = ""
            async with asyncio.timeout(DEADLINE_S):
                while not address:
                    line = (await process.stderr.readline()).decode()
                    assert line, "Chromium ended"
                    if found := re.search(r"listening on (ws://\S+)", line):
                        address = found[1]
            drain = asyncio.create_task(process.stderr.read())
            async with (
                aiohttp.ClientSession() as session,
                session.ws_connect(address, max_msg_size=0) as socket,
            ):
                page = Page(socket)
                await page.open()
                yield page
                await socket.close()
                await page._listener
            drain.cancel()
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()

"""The status page in Chromium, before a real router."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from proxy.config import load
from proxy.core.fleet.leases import Decision
from proxy.core.model.types import Reason
from proxy.setup.app import App
from proxy.wire.exchange.request_record import RequestRecord
from tests.proxy.core.making import make_info
from tests.proxy.running import DEADLINE_S, ask, entry, serving, wait_until_up, write_fleet
from tests.proxy.status_page.browser import Page, browser
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.raw_client import chat
from tests.proxy.wire.site import eventually
from vllm_sched.workers.launch import free_port

pytestmark = pytest.mark.browser

MARKUP = b"<img src=x onerror=alert(1)>"
MINUTE = 5000  # requests
TABLE = "document.querySelector('#requests').innerText"
PRESSED = "document.activeElement.getAttribute('aria-pressed')"
OUTLINE = "getComputedStyle(document.activeElement).outlineStyle"
CHOSEN_POSITION = """
(() => {
  const box = document.querySelector('#lanes'), { top, lane } = geometry();
  const y = top + Math.min(rows.get(chosen).lane, 1199) * lane;
  return [box.scrollTop, y, box.scrollTop + box.clientHeight - lane];
})()
"""
COLOURS = """
(() => {
  const canvas = document.querySelector('#lanes canvas');
  const { width, height } = canvas;
  const copy = new OffscreenCanvas(width, height).getContext('2d', { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  const data = copy.getImageData(0, 20, width, height - 20).data;
  const seen = new Set();
  for (let at = 0; at < data.length; at += 4)
    if (data[at + 3] === 255) seen.add([data[at], data[at + 1], data[at + 2]].join());
  return [...seen];
})()
"""


# Shows long names and reasons; returns invisible heads and truncated cells.
LONG_NAMES = """
(() => {
  const model = 'meta-llama/Llama-3.3-70B-Instruct-FP8-dynamic';
  const why = "GET /health: [Errno 111] Connect call failed ('10.120.30.113', 8000)";
  const wide = 'W'.repeat(34);
  const latency = { what: 'TTFT', pool: 'general', size: 'short', model: wide, count: 99999,
    p50_s: 12, p99_s: 99 };
  const worker = { name: 'worker-short-10', model, state: 'down', why, most: 1024, requests: 1024,
    prefill_tokens: 1234567, decode_tokens: 1234567, wait_s: 99, running: 1024, waiting: 1024,
    kv_usage: 1 };
  const workers = state.workers.map((each) => ({ ...each, ...worker }));
  state = { ...state, latencies: [latency], workers };
  showState();
  const unseen = [], cut = [];
  for (const id of ['latencies', 'workers']) {
    const edge = $(id).closest('.scroll').getBoundingClientRect().right;
    for (const head of $(id).tHead.rows[0].cells)
      if (head.getBoundingClientRect().right > edge + 1) unseen.push(head.innerText);
    for (const cell of $(id).querySelectorAll('td'))
      if (cell.scrollWidth > cell.clientWidth && cell.title !== cell.innerText)
        cut.push(cell.innerText);
  }
  return [unseen, cut];
})()
"""


class PageSite:
    """Workers, and a router that may be restarted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.fakes = {"short": FakeWorker("s0"), "long": FakeWorker("l0")}
        self.app: App

    async def start(self, **admin: object) -> None:
        workers = (entry(fake, role=role) for role, fake in self.fakes.items())
        router, routing = {"admin": {"port": 0} | admin}, {"short_limit": 500}
        source = write_fleet(self._folder, *workers, router=router, routing=routing)
        self.app = App(load(source), source)
        await self.app.start()
        await wait_until_up(self.app, "s0", "l0")

    @property
    def admin(self) -> int:
        return int(self.app.admin_url.rsplit(":", 1)[1])

    async def ask(self, text: str = "hi", *headers: bytes, model: str = "tiny") -> int:
        return await ask(self.app, chat(text, *headers, model=model, stream=True))


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[PageSite]:
    site = PageSite(tmp_path)
    async with serving(*site.fakes.values()):
        for fake in site.fakes.values():
            fake.always(scripts.stream(6, gap_s=0.02))
        await site.start()
        yield site
        await site.app.stop()


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    async with browser() as page:
        yield page


async def test_page_shows_requests_and_workers(site: PageSite, page: Page) -> None:
    assert await site.ask("before the first viewer") == 200
    await page.goto(site.app.admin_url)
    await page.wait_until("statusPage.rows === 1 && statusPage.state === 'up'")
    assert await site.ask() == 200
    assert await site.ask("long " * 600) == 200
    assert await site.ask("hi", b"X-Request-Id: " + MARKUP, model="nope") == 404
    await page.wait_until("statusPage.rows === 4 && statusPage.drawn === 4")
    table = await page.wait_until(f"{TABLE}.includes('onerror') && {TABLE}")
    assert {"short_pool", "long_pool", "unknown_model", "404", "s0", "l0"} <= set(table.split())
    assert await page.run("document.querySelectorAll('img').length") == 0
    workers = await page.wait_until("document.querySelector('#workers').innerText")
    assert {"s0", "l0", "short", "long", "closed"} <= set(workers.split())
    site.app.fleet.roster.set_served("s0", ["llama"])
    bad = "document.querySelector('#workers .bad')?.innerText"
    await page.wait_until(f"{bad} === 'wrong_model: serves llama, not tiny'")
    await page.wait_until("/TTFT\\s+short/.test(document.querySelector('#latencies').innerText)")
    await page.wait_until("document.querySelector('#decisions').innerText.includes('long_pool')")
    colours = {scheme: set(await colours_in(page, scheme)) for scheme in ("light", "dark")}
    assert "0,99,166" in colours["light"]  # blue of short requests
    assert "240,160,75" in colours["dark"]  # orange of long requests
    assert await page.run("getComputedStyle(document.body).backgroundColor") == "rgb(19, 20, 22)"
    assert page.errors == []


async def test_long_names_do_not_hide_numbers(site: PageSite, page: Page) -> None:
    await page.goto(site.app.admin_url)
    await page.wait_until("statusPage.state === 'up' && state !== null")
    invisible, cut = await page.run(LONG_NAMES)
    assert set(invisible) <= {"model"}
    assert cut == []


async def test_failing_workers_are_shown_first(
    site: PageSite, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.status_page.snapshot.MAX_WORKERS", 2)
    for number in range(3):
        nowhere = f"http://127.0.0.1:{free_port()}"
        site.app.fleet.roster.add(
            replace(site.app.fleet.roster.get("l0").spec, name=f"z{number}", url=nowhere)
        )
    await page.goto(site.app.admin_url)
    await page.wait_until("/^long\\s+z.\\s+down/.test($('workers').tBodies[0]?.rows[1]?.innerText)")
    names = "[...$('workers').tBodies[0].rows].map((row) => row.cells[1].innerText)"
    assert [name[0] for name in await page.run(names)] == ["z", "z"]
    caption = await page.run("$('workers').caption.innerText")
    assert caption == (
        "Workers: long 1 of 4 up, 0 in flight; short 1 of 1 up, 0 in flight. "
        "3 more are not shown, none of them in worse state"
    )


async def colours_in(page: Page, scheme: str) -> list[str]:
    await page.prefer(color_scheme=scheme)
    drawn = await page.run("statusPage.frames")
    await page.wait_until(f"statusPage.frames > {drawn} + 2")
    return list(await page.run(COLOURS))


async def test_page_works_with_the_keyboard(site: PageSite, page: Page) -> None:
    await page.prefer(reduced_motion="reduce")
    await page.goto(site.app.admin_url)
    await page.wait_until("statusPage.state === 'up'")
    assert await site.ask() == 200
    await page.wait_until("statusPage.drawn === 1")
    await page.press("Tab")
    assert await page.run("document.activeElement.innerText") == "S short"
    assert await page.run(OUTLINE) == "solid"
    await page.press("Enter")
    assert await page.run(PRESSED) == "false"
    await page.wait_until("statusPage.drawn === 0")
    await page.press(" ")
    assert await page.run(PRESSED) == "true"
    await page.press(*["Tab"] * 6)
    assert await page.run("document.activeElement.id") == "pause"
    await page.press("Enter")
    assert await page.run("document.activeElement.innerText") == "Go on"
    await page.press("Tab")
    assert await page.run("document.activeElement.id") == "lanes"
    assert await page.run(OUTLINE) == "solid"
    await page.press("ArrowRight")
    chosen = await page.run("document.querySelector('#chosen').innerText")
    assert "route short" in chosen
    assert "worker s0" in chosen
    await page.press("Escape")
    assert await page.run("document.querySelector('#chosen').innerText") == ""
    assert page.errors == []


async def test_paused_page_does_not_change(site: PageSite, page: Page) -> None:
    await page.goto(site.app.admin_url)
    await page.wait_until("statusPage.state === 'up'")
    assert await asyncio.gather(*(site.ask() for _ in range(5))) == [200] * 5
    await page.wait_until("statusPage.rows === 5 && statusPage.drawn === 5")
    await page.run("document.querySelector('#pause').click()")
    seen = f"[statusPage.drawn, document.querySelector('#lanes canvas').toDataURL(), {TABLE}]"
    before = await page.run(seen)
    await page.wait_until("[...rows.values()].every((row) => field(row, 'ended') !== null)")
    await site.app.stop()  # from now on, the test sends events
    await page.wait_until("statusPage.state === 'down'")
    fields = "Object.keys(index).reverse()"
    for event in (  # a minute passes, then a restarted router has no rows
        "take('news', {now: clock() + WINDOW + 5000, rows: [], ticks: []})",
        f"take('all', {{now: 5, run: 'b', fields: {fields}, rows: [], ticks: []}})",
    ):
        await page.run(event)
        assert await page.run("statusPage.rows") == 0
        frames = await page.run("statusPage.frames")
        await page.wait_until(f"statusPage.frames > {frames} + 2")
        assert await page.run(seen) == before
    await page.run("document.querySelector('#pause').click()")
    await page.wait_until("statusPage.drawn === 0")
    assert await page.run("document.querySelectorAll('#requests tbody tr').length") == 0
    assert [error for error in page.errors if "ERR_" not in error] == []


async def test_chosen_request_is_scrolled_into_view(site: PageSite, page: Page) -> None:
    await page.goto(site.app.admin_url)
    await page.wait_until("statusPage.state === 'up'")
    worker, began = next(iter(site.app.fleet.roster)), site.app.wire.clock() - 10.0
    for at in range(1250):  # concurrent, so each has its own lane
        record, now = RequestRecord(), began + at / 1000
        record.started, record.info = now, make_info(prompt=200)
        record.place(now + 0.01, Decision(worker, Reason.LEAST_LOADED))
        record.close(now + 5.0, site.app.metrics, "completions", 200, None)
        if at % 500 == 499:
            await eventually(lambda: not site.app.live.recorder._ended, within=DEADLINE_S)
    await page.wait_until("statusPage.rows === 1250 && statusPage.drawn === 1200")
    assert await page.run("document.querySelector('#undrawn').innerText") == (
        "50 more lanes are not drawn."
    )
    await page.run("document.querySelector('#lanes').focus()")
    for key, lane in (("End", 1249), ("ArrowLeft", 1248), ("Home", 0), ("ArrowRight", 1)):
        await page.press(key)
        assert await page.run("rows.get(chosen).lane") == lane
        chosen = await page.run("document.querySelector('#chosen').innerText")
        assert ("not drawn" in chosen) == (lane >= 1200)
        above, y, below = await page.run(CHOSEN_POSITION)
        assert above <= y <= below
    await page.run("document.querySelector('#lanes').scrollTop = 600")
    await page.press("ArrowRight")
    above, y, below = await page.run(CHOSEN_POSITION)
    assert above <= y <= below
    assert page.errors == []


async def test_page_reconnects_after_a_restart(site: PageSite, page: Page) -> None:
    await page.goto(site.app.admin_url)
    await page.wait_until("statusPage.state === 'up'")
    assert await site.ask() == 200
    await page.wait_until("statusPage.rows === 1")
    port = site.admin
    await site.app.stop()
    await page.wait_until("statusPage.state === 'down'")
    link = await page.run("document.querySelector('#link').innerText")
    assert "does not answer" in link
    await site.start(port=port)
    await page.wait_until("statusPage.state === 'up'")
    assert "restarted" in await page.run("document.querySelector('#link').innerText")
    assert await page.run("statusPage.rows") == 0
    assert await site.ask() == 200
    await page.wait_until("statusPage.rows === 1 && statusPage.drawn === 1")
    tile = "document.querySelector('#tiles').innerText.includes('answered, last minute\\n1\\n')"
    await page.wait_until(tile)
    # Only connection errors are allowed.
    assert [error for error in page.errors if "ERR_" not in error] == []


async def test_page_needs_the_key(
    site: PageSite, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "a-key-of-many-letters-0123456789"
    monkeypatch.setenv("STATUS_PAGE_KEY", key)
    await site.app.stop()
    await site.start(key_env="STATUS_PAGE_KEY")
    await page.goto(f"http://127.0.0.1:{site.admin}/")
    assert await page.run("window.statusPage === undefined")
    await page.goto(f"http://any:{key}@127.0.0.1:{site.admin}/")  # as if typed into the dialog
    await page.wait_until("statusPage.state === 'up'")
    assert await site.ask() == 200
    await page.wait_until("statusPage.rows === 1")


async def test_page_draws_five_thousand_requests(
    site: PageSite, page: Page, capsys: pytest.CaptureFixture[str]
) -> None:
    await page.goto(site.app.admin_url)
    await page.wait_until("statusPage.state === 'up'")
    app, rng = site.app, random.Random(1)
    workers = list(app.fleet.roster)
    for count in range(MINUTE):
        now = app.wire.clock() - rng.uniform(2.0, 30.0)  # recent enough for the window
        record = RequestRecord()
        record.started, record.info = now, make_info(prompt=200)
        record.place(now + 0.01, Decision(rng.choice(workers), Reason.LEAST_LOADED))
        for _ in range(30):
            now += rng.expovariate(20.0)
            record.record_tokens(now, app.metrics)
        record.close(now, app.metrics, "completions", 200, None)
        if count % 500 == 499:
            await eventually(lambda: not app.live.recorder._ended, within=DEADLINE_S)
            await asyncio.sleep(0)
    await page.wait_until(f"statusPage.rows === {MINUTE} && statusPage.drawn > {MINUTE - 1000}")
    stats = await page.run("statusPage")
    # The page continues to draw and to read events.
    before = await page.run("[statusPage.frames, statusPage.messages]")
    await page.wait_until(
        f"statusPage.frames > {before[0]} + 5 && statusPage.messages > {before[1]} + 5"
    )
    with capsys.disabled():  # shown without a limit
        sys.stdout.write(f" [{MINUTE} requests drawn in {stats['draw_ms']:.0f} ms] ")
    assert "dropped" not in await page.run(TABLE)
    assert page.errors == []

"""Files, targets and requests shown on pages work."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import shlex
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.config import load
from proxy.setup.app import App
from tests.docs.test_snippets import PAGES, ROOT, fenced, name_of
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.site import eventually

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
NAMED = re.compile(
    r"(?<![\w./~-])(?:deploy|docs|grafana|benchmarks|scripts|tests|proxy|vllm_sched)/[\w./*-]*[\w*/]"
)
MADE = {*(ROOT / ".gitignore").read_text().split()}  # files that a reader creates
RUN = re.compile(r"python -m ((?:benchmarks|grafana|proxy|vllm_sched)[\w.]*)([^`\n]*)")
CURL = re.compile(r"^(?: {4}){1,2}(curl .*)$|`(curl [^`]+)`", re.MULTILINE)
OTHERS = [ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
each_page = pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=name_of)


@each_page
def test_named_files_exist(page: Path) -> None:
    for named in set(NAMED.findall(page.read_text())) - MADE:
        assert list(ROOT.glob(named.rstrip("/"))), named


@each_page
def test_named_targets_and_modules_exist(page: Path) -> None:
    text = page.read_text()
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"(?:`|^ {4})make ([a-z-]+)", text, re.MULTILINE)) <= {*targets}
    for module, options in set(RUN.findall(text.replace("\\\n", " "))):
        source = source_of(module)
        for option in re.findall(r" (--[\w-]+)", options):
            assert f'"{option}"' in source, f"{module}{options}"


def source_of(module: str) -> str:
    """Return the source that `python -m` runs."""
    spec = importlib.util.find_spec(module)
    assert spec, module
    assert spec.origin, module
    path = Path(spec.origin)
    return (path.with_name("__main__.py") if path.name == "__init__.py" else path).read_text()


def curls() -> list[str]:
    return [
        re.sub(r"\s+#.*", "", line or inline)
        for page in PAGES
        for line, inline in CURL.findall(page.read_text().replace("\\\n", " "))
    ]


@pytest.fixture
async def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[App]:
    """Run a router and a fake worker with the names that the pages use."""
    fake = FakeWorker("long-0", model=MODEL)
    await fake.listen()
    message = {"role": "assistant", "content": "Because."}
    fake.always(scripts.answer(body=json.dumps({"choices": [{"message": message}]}).encode()))
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "fleet.yaml"
    source.write_text(
        f"model: {MODEL}\nworkers: [{{name: long-0, url: '{fake.url}'}}]\n"
        "router: {port: 0, admin: {port: 0}, probe: {interval_s: 0.05}, batches: {path: kept}}\n"
    )
    app = App(load(source), source)
    await app.start()
    await eventually(lambda: all(worker.up for worker in app.fleet.roster), within=60.0)
    yield app
    await app.stop()
    await fake.stop()


async def test_curl_commands_are_answered(app: App) -> None:
    commands = curls()
    assert len(commands) > 4
    async with aiohttp.ClientSession() as session:
        for command in commands:
            words = shlex.split(command)[1:]
            given = dict(pairwise(words))
            (url,) = (word for word in words if word.startswith("localhost:"))
            base = {"localhost:8000": app.url, "localhost:8001": app.admin_url}
            host, _, path = url.partition("/")
            headers = [value.split(": ") for flag, value in pairwise(words) if flag == "-H"]
            if "-d" in given:  # vLLM refuses another type
                assert ["Content-Type", "application/json"] in headers, command
            async with session.request(
                given.get("-X", "POST" if "-d" in given else "GET"),
                f"{base[host]}/{path}",
                data=given["-d"].replace("...", MODEL) if "-d" in given else None,
                headers=dict(headers),
            ) as answer:
                assert answer.status == 200, (command, await answer.text())


async def test_python_of_the_quick_start_runs(app: App) -> None:
    pytest.importorskip("openai")
    (block,) = fenced(ROOT / "docs" / "quickstart.md", "python")
    assert MODEL in block
    here = block.replace("http://127.0.0.1:8000", f"http://127.0.0.1:{app.wire.port}")
    assert here != block
    names: dict[str, object] = {}
    code = compile(here, "docs/quickstart.md", "exec")
    await asyncio.to_thread(exec, code, names)
    names["client"].close()  # type: ignore[attr-defined]
    [choice] = names["answer"].choices  # type: ignore[attr-defined]
    assert choice.message.content == "Because."


async def test_python_of_the_batches_page_runs(app: App, tmp_path: Path) -> None:
    openai = pytest.importorskip("openai")
    page = ROOT / "docs" / "batches.md"
    (block,) = fenced(page, "python")
    # The page's example line, with its ellipses filled in.
    [line] = re.findall(r"^A line is `(.*?)`", page.read_text(), re.MULTILINE)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Why?"}]}
    for given in ("a", "/v1/chat/completions", body):
        content = json.dumps(given)
        line = line.replace("{...}" if given is body else "...", content, 1)
    (tmp_path / "night.jsonl").write_text(line)
    url = f"http://127.0.0.1:{app.wire.port}/v1"

    def run() -> str:
        with openai.OpenAI(base_url=url, api_key="unused", max_retries=0) as client:
            names: dict[str, Any] = {"client": client}
            exec(compile(block, "docs/batches.md", "exec"), names)  # noqa: S102 - our own page
            done = names["batch"]
            for _ in range(600):
                if done.status not in ("validating", "in_progress", "finalizing"):
                    break
                time.sleep(0.1)
                done = client.batches.retrieve(done.id)
            assert (done.status, done.request_counts.completed) == ("completed", 1)
            return str(client.files.content(done.output_file_id).text)

    result = json.loads(await asyncio.to_thread(run))
    content = result["response"]["body"]["choices"][0]["message"]["content"]
    assert (result["custom_id"], content) == ("a", "Because.")

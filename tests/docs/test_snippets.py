"""Snippets of README and docs work: Python, fleet files, commands and links."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.config import parse
from proxy.core.routing import registry
from vllm_sched.cli.main import main, parser

ROOT = Path(__file__).parents[2]
DOCS = sorted([*ROOT.glob("docs/*.md"), ROOT / "deploy" / "README.md"])
PAGES = [ROOT / "README.md", *DOCS]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^\s*(?:\$ )?(vllm-sched .*)$|`(vllm-sched [^`]+)`", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")
ANCHOR = re.compile(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
PARSER = parser()
QUICK = ("check", "explain", "key")
PLACEHOLDER = re.compile(r"\.\.\.|\[|NAME|SIDE")


def name_of(path: Path) -> str:
    """Return a path as the failing test shows it."""
    return str(path.relative_to(ROOT))


def fenced(page: Path, kind: str) -> list[str]:
    return [text for found, text in FENCE.findall(page.read_text()) if found == kind]


def commands(page: Path) -> Iterator[tuple[str, bool]]:
    text = page.read_text().replace("\\\n", " ")
    for line, inline in COMMAND.findall(text):
        command = re.sub(r"\s+#.*|[;&|].*", "", line or inline).strip()
        if not PLACEHOLDER.search(command):
            yield command, bool(line)


def quick(page: Path) -> list[str]:
    """Return the complete commands that need no worker and no router."""
    found = [command for command, whole in commands(page) if whole and command.split()[1] in QUICK]
    return [command for command in found if "--live" not in command]


def test_examples_of_extending_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "RULES", dict(registry.RULES))
    names: dict[str, object] = {"__name__": "extending"}
    blocks = fenced(ROOT / "docs" / "extending.md", "python")
    assert len(blocks) == 6
    for block in blocks:
        exec(compile(block, "docs/extending.md", "exec"), names)  # noqa: S102 - our own page


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_fleet_files_are_valid(page: Path) -> None:
    for block in fenced(page, "yaml"):
        text = textwrap.dedent(block)
        if not re.search(r"^model:", text, re.MULTILINE):  # a part of a fleet file
            text = "model: m\n" + text
        if not re.search(r"^(workers|discovery):", text, re.MULTILINE):
            text += "workers: [{name: w0, url: 'http://127.0.0.1:8100'}]\n"
        parse(text, name_of(page))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_have_known_options(page: Path) -> None:
    for text, whole in commands(page):
        command, *words = shlex.split(text)[1:]
        if command == "serve":  # accepts all options of vLLM
            words = [command, *(words or ["MODEL"])]
        elif whole:
            words = [command, *words]
        else:  # only its options are checked
            known = PARSER._subparsers._group_actions[0].choices[command]._option_string_actions
            assert {word for word in words if word.startswith("--")} <= set(known), text
            continue
        _, rest = PARSER.parse_known_args(words)
        assert not rest or command == "serve", f"{text}: {rest}"


@pytest.mark.parametrize("page", [page for page in PAGES if quick(page)], ids=name_of)
def test_quick_commands_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    for block in reversed(fenced(page, "yaml")):  # the first is the page's `fleet.yaml`
        (tmp_path / "fleet.yaml").write_text(textwrap.dedent(block))
    monkeypatch.chdir(tmp_path)
    for command in quick(page):
        assert main(shlex.split(command)[1:]) == 0, command


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_have_targets_and_anchors_are_headings(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), target
    for target, anchor in ANCHOR.findall(page.read_text()):
        text = FENCE.sub("", ((page.parent / target) if target else page).read_text())
        assert anchor in [anchored(each) for each in HEADING.findall(text)], anchor


def anchored(heading: str) -> str:
    """Return the anchor of a heading, as GitHub writes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_pages_contain_commands_and_files() -> None:
    assert sum(len(list(commands(page))) for page in PAGES) > 20
    assert sum(len(fenced(page, "yaml")) for page in PAGES) > 2
    assert {said.split()[1] for page in PAGES for said in quick(page)} == {*QUICK}

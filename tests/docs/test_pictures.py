"""Every picture of the docs is listed with its command and shown on a page."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from benchmarks.figures import FIGURES
from tests.docs.test_snippets import LINK, PAGES, PARSER, ROOT, name_of

DOCS = ROOT / "docs"
PICTURES = sorted(path for path in DOCS.rglob("*") if path.suffix in (".svg", ".png"))
ROW = re.compile(r"^\| \[[^]]*\]\(([^)]+)\)[^|]*\| `([^`]+)` \|$", re.MULTILINE)
NAMED = {
    (DOCS / picture).resolve(): shlex.split(command)
    for picture, command in ROW.findall((DOCS / "pictures.md").read_text())
}
SHOWN = re.compile(r"^!" + r"\[[^]]*" + LINK.pattern, re.MULTILINE)


def test_listed_pictures_are_the_pictures_of_the_docs() -> None:
    assert [*map(name_of, sorted(NAMED))] == [*map(name_of, PICTURES)]


@pytest.mark.parametrize("picture", PICTURES, ids=name_of)
def test_command_of_a_picture_exists(picture: Path) -> None:
    program, *words = NAMED[picture]
    if program == "vllm-sched":
        given = PARSER.parse_args(words)
        assert ROOT / given.plot in (picture, picture.parent)  # a file or a folder
        return
    assert (program, words[0]) == ("python", "-m")
    assert importlib.util.find_spec(words[1])
    if words[1] == "benchmarks.figures":
        out, only = words.index("--out"), words.index("--only")
        assert ROOT / words[out + 1] == picture.parent
        assert words[only + 1] in FIGURES


@pytest.mark.parametrize("picture", PICTURES, ids=name_of)
def test_picture_is_shown_on_a_page(picture: Path) -> None:
    shown = {
        (page.parent / target).resolve()
        for page in PAGES
        for target in SHOWN.findall(page.read_text())
    }
    assert picture in shown

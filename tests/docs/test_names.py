"""Functions, classes, files and folders named on pages exist in the code."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.test_snippets import ROOT

PAGES = [ROOT / "docs" / name for name in ("structures.md", "extending.md")]
NAME = re.compile(r"`((?:proxy|vllm_sched)\.[\w.]+)`")
NAMES = sorted({name for page in PAGES for name in NAME.findall(page.read_text())})
FILE = re.compile(r"`((?:benchmarks|deploy|docs|grafana|proxy|tests|vllm_sched)/[\w./-]*)`")
FOLDER = re.compile(r"^((?:│   |    )*)(?:[├└]── )?(\w+)/ ", re.MULTILINE)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def is_defined(name: str) -> bool:
    """Return whether a dotted name is a module, or a class, function or constant in one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:end])
        if path.is_dir() and end == len(parts):
            return True
        if path.with_suffix(".py").exists():
            nodes: list[ast.stmt] = tree_of(path.with_suffix(".py")).body
            for part in parts[end:]:
                found = [node for node in nodes if part in names_of(node)]
                if not found:
                    return False
                nodes = getattr(found[0], "body", [])
            return True
    return False


def names_of(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


@pytest.mark.parametrize("name", NAMES)
def test_name_on_a_page_is_defined(name: str) -> None:
    assert is_defined(name)


def test_files_on_a_page_exist() -> None:
    files = {file for page in PAGES for file in FILE.findall(page.read_text())}
    assert len(files) > 30
    assert [file for file in sorted(files) if not (ROOT / file).exists()] == []


def test_pages_contain_names() -> None:
    assert len(NAMES) > 40
    assert not is_defined("proxy.core.router.Router.no_such_method")


def test_folder_tree_matches_the_packages() -> None:
    text = PAGES[0].read_text().split("```")[1]
    shown, above = set(), [""]
    for indent, name in FOLDER.findall(text):
        root = name in ("proxy", "vllm_sched")
        depth = 0 if root else len(indent) // 4 + 1
        above[depth:] = [name]
        shown.add("/".join(above))
    packages = (ROOT / "proxy", ROOT / "vllm_sched")
    folders = {path.parent for package in packages for path in package.rglob("*.py")}
    assert shown == {str(folder.relative_to(ROOT)) for folder in folders}

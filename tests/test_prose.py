"""The limits on names, prose and sizes that CONTRIBUTING.md states.

Prose is every comment and docstring. Words that make a request or a worker a person, and phrases
that hide the subject, stop a reader.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.test_walls import MODULES, ROOT, name_of, tree_of

PERSONS = re.compile(
    r"\b(who|whom|whose|nobody|somebody|everybody|anybody|he|his|him|she)\b", re.IGNORECASE
)
PHRASES = re.compile(
    r"\b(one that|those that|so many|so long|so much|or else|reckon(s|ed|ing)?|meanwhile|of late|"
    r"as far as|comes? to|is to be|are to be|beside(?! s)|lest|thereof|wherever|whichever|whatever|"
    r"likewise)\b",
    re.IGNORECASE,
)
WORD = re.compile(r"[A-Za-z']+")
PACKAGES = ("proxy", "vllm_sched")
# Per 1,000 words; words per 1,000 lines.
MAX_PERSONS, MAX_PHRASES, MAX_WORDS = 1.0, 1.5, 1000.0
MAX_MODULE_LINES, MAX_CLASS_LINES, MAX_ATTRIBUTES, MAX_LARGE_CLASSES = 450, 300, 20, 10
MAX_README_LINES, MAX_README_WIDTH, MAX_DOCS_PERSONS = 200, 120, 2.0
MAX_CHANGELOG_LINES = 60


@cache
def source_of(path: Path) -> str:
    """Return a module's source."""
    return path.read_text()


@cache
def prose_of(path: Path) -> str:
    """Return a module's comments and docstrings."""
    tokens = tokenize.generate_tokens(io.StringIO(source_of(path)).readline)
    parts = [token.string.lstrip("#! ") for token in tokens if token.type == tokenize.COMMENT]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree_of(path)) if isinstance(node, documented)]
    parts += [ast.get_docstring(node) or "" for node in nodes]
    return "\n".join(parts)


def per_thousand(count: int, total: int) -> float:
    """Return a rate per 1,000."""
    return 1000 * count / max(total, 1)


@cache
def classes() -> list[tuple[Path, ast.ClassDef]]:
    """Return all classes with their modules."""
    return [
        (path, node)
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
    ]


def attributes_of(node: ast.ClassDef) -> set[str]:
    """Return the attributes that a class assigns to `self`."""
    found = set()
    for child in ast.walk(node):
        targets: list[ast.expr] = []
        if isinstance(child, ast.Assign):
            targets = child.targets
        elif isinstance(child, ast.AnnAssign | ast.AugAssign):
            targets = [child.target]
        for target in targets:
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                found |= {target.attr} if target.value.id == "self" else set()
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_prose_is_plain_and_short(package: str) -> None:
    paths = [path for path in MODULES if name_of(path).startswith(f"{package}/")]
    text = "\n".join(map(prose_of, paths))
    words = len(WORD.findall(text))
    assert per_thousand(len(PERSONS.findall(text)), words) <= MAX_PERSONS
    assert per_thousand(len(PHRASES.findall(text)), words) <= MAX_PHRASES
    assert per_thousand(words, sum(source_of(path).count("\n") for path in paths)) <= MAX_WORDS


@pytest.mark.parametrize("package", PACKAGES)
def test_class_names_are_unique(package: str) -> None:
    names = Counter(
        node.name for path, node in classes() if name_of(path).startswith(f"{package}/")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_modules_and_classes_are_small() -> None:
    lines = {name_of(path): source_of(path).count("\n") for path in MODULES}
    assert [name for name, count in lines.items() if count > MAX_MODULE_LINES] == []
    sizes = {
        f"{name_of(path)}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path, node in classes()
    }
    assert [name for name, count in sizes.items() if count > MAX_CLASS_LINES] == []
    large = [node.name for _, node in classes() if len(attributes_of(node)) > MAX_ATTRIBUTES]
    assert len(large) <= MAX_LARGE_CLASSES, large


def test_readme_docs_and_changelog() -> None:
    readme = (ROOT / "README.md").read_text()
    assert readme.count("\n") <= MAX_README_LINES
    prose = [line for line in readme.splitlines() if not line.startswith(("|", "    ", "!["))]
    assert max(map(len, prose)) <= MAX_README_WIDTH
    docs = "\n".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))
    assert per_thousand(len(PERSONS.findall(docs)), len(WORD.findall(docs))) <= MAX_DOCS_PERSONS
    assert (ROOT / "CHANGELOG.md").read_text().count("\n") <= MAX_CHANGELOG_LINES

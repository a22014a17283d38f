"""The walls between packages: allowed imports and sizes."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_MODULES_PER_FOLDER = 15
HEAVY = {"vllm", "torch", "transformers", "tokenizers", "safetensors"}

# Layers of each package from the top; a module imports only its own layer and lower ones.
LAYERS = {
    "vllm_sched": [
        "cli", "sim", "bench", "workers", "engine", "policies", "cost", "metrics_folder", "files",
        "errors", "version",
    ],
    "proxy": [
        "app", "processes", "setup", "admin", "batches", "wire", "discovery", "status_page",
        "health", "journal", "telemetry", "metrics", "http", "net", "transfer", "core", "config",
        "compiled", "text_files", "errors",
    ],
}  # fmt: skip
PURE = ("vllm_sched/policies", "vllm_sched/cost", "proxy/core", "proxy/transfer")
# Modules for I/O, waiting and clocks.
NOT_PURE = {
    *HEAVY, "aiohttp", "asyncio", "fastapi", "http", "httpx", "os", "pathlib", "prometheus_client",
    "requests", "select", "shutil", "signal", "socket", "subprocess", "threading", "time",
    "urllib", "uvicorn", "uvloop",
}  # fmt: skip
MODULES = sorted([*ROOT.glob("vllm_sched/**/*.py"), *ROOT.glob("proxy/**/*.py")])


@cache
def tree_of(path: Path) -> ast.Module:
    """Return a module's syntax tree."""
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Return every module that a file imports, inside functions too."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def name_of(path: Path) -> str:
    """Return a module's path as the failing test shows it."""
    return str(path.relative_to(ROOT))


def above(path: Path) -> Iterator[str]:
    """Yield the imports of higher layers."""
    package, *rest = path.relative_to(ROOT).with_suffix("").parts
    layers = LAYERS[package]
    if not rest or rest[0] in ("__init__", "__main__"):
        return
    assert rest[0] in layers, f"{name_of(path)} is in no layer"
    for module in imports(path):
        parts = module.split(".")
        is_own = parts[0] == package and len(parts) > 1 and parts[1] in layers
        if is_own and layers.index(parts[1]) < layers.index(rest[0]):
            yield module


# One test for all modules: a test for each module takes more time than its check.


def test_imports_go_down_only() -> None:
    assert {name_of(path): found for path in MODULES if (found := [*above(path)])} == {}


def test_packages_import_each_other_only_where_allowed() -> None:
    wrong = {}
    for path in MODULES:
        name = name_of(path)
        found = {module.split(".")[0] for module in imports(path)}
        if name.startswith("proxy"):
            wrong[name] = found & {"vllm_sched", *HEAVY}
        elif not name.startswith(("vllm_sched/cli", "vllm_sched/sim")):
            wrong[name] = found & {"proxy"}
        if not name.startswith("vllm_sched/engine"):
            wrong[name] = wrong.get(name, set()) | found & {"vllm"}
    assert {name: found for name, found in wrong.items() if found} == {}


def test_pure_packages_do_no_io() -> None:
    found = {
        name_of(path): {module.split(".")[0] for module in imports(path)} & NOT_PURE
        for path in MODULES
        if name_of(path).startswith(PURE)
    }
    assert len(found) > 50
    assert {name: modules for name, modules in found.items() if modules} == {}


# They make a `RequestInfo`. No other module changes one.
INFO_MAKERS = {
    "proxy/admin/schemas.py", "proxy/core/request/parser.py", "proxy/core/request/sizing.py",
    "vllm_sched/sim/fleet/request_info.py",
}  # fmt: skip


def test_what_is_known_of_a_request_is_changed_where_it_is_read() -> None:
    changed = {
        name_of(path): found
        for path in MODULES
        if (found := changes_of_request_infos(tree_of(path)))
    }
    assert changed.keys() <= INFO_MAKERS


@pytest.mark.parametrize(
    "code", ["ask.long = True", "lease.ask.drops += 1", "def f(one: RequestInfo): one.pinned = ''"]
)
def test_a_change_of_a_request_info_is_found(code: str) -> None:
    assert changes_of_request_infos(ast.parse(code))


def changes_of_request_infos(tree: ast.AST) -> list[str]:
    """Return the assigned attributes of `ask`, `x.ask`, and names of type `RequestInfo`."""
    infos = {"ask"}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None:
            infos |= {node.arg} if "RequestInfo" in ast.unparse(node.annotation) else set()
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and not isinstance(node.ctx, ast.Load)
        and ast.unparse(node.value).split(".")[-1].lstrip("_") in infos
    ]


def module_of(path: Path) -> str:
    """Return a module's name."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the groups of modules that import each other."""
    reached = {module: reachable(module, graph) for module in graph}
    found = {
        frozenset(other for other in reached[module] if module in reached[other]) | {module}
        for module in graph
    }
    return [set(group) for group in found if len(group) > 1]


def reachable(module: str, graph: dict[str, set[str]]) -> set[str]:
    """Return the modules that a module imports, directly or through others."""
    found: set[str] = set()
    left = [module]
    while left:
        new = graph[left.pop()] - found
        found |= new
        left += new
    return found


def test_imports_have_no_circles() -> None:
    """Imports for the type checker count too."""
    known = {module_of(path) for path in MODULES}
    graph: dict[str, set[str]] = {}
    for path in MODULES:
        found = {module for module in imports(path) if module in known} - {module_of(path)}
        # `from package import module` imports the module, not the package.
        graph[module_of(path)] = {
            module for module in found if not any(other.startswith(f"{module}.") for other in found)
        }
    assert circles(graph) == []


def test_folders_have_few_modules() -> None:
    widths = Counter(path.parent for path in MODULES if path.name != "__init__.py")
    assert {
        name_of(folder): width for folder, width in widths.items() if width > MAX_MODULES_PER_FOLDER
    } == {}


@pytest.mark.parametrize("package", ["vllm_sched", "proxy", "vllm_sched.cli.main"])
def test_importing_loads_nothing_heavy(package: str) -> None:
    described = "; vllm_sched.cli.main.parser()" if package.startswith("vllm_sched.cli") else ""
    code = f"import sys, {package}{described}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []

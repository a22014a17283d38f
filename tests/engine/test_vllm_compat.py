"""An unsupported vLLM is refused in one line."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler

from tests.engine.schedulers import make_request, make_scheduler, step
from vllm_sched import SyncPolicyScheduler
from vllm_sched.engine import vllm_compat
from vllm_sched.engine.scheduler import PolicyMixin
from vllm_sched.engine.telemetry import EngineStats, TelemetryMixin
from vllm_sched.errors import UnsupportedVllmError

SERVE = "import sys; from vllm_sched.cli.main import main; sys.exit(main(['serve', 'some']))"


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("0.30.2", False),
        ("0.31.0", True),
        ("0.32.0+cpu", True),
        ("0.33.1rc1", True),
        ("0.34.0", False),
        ("1.0", False),
        ("dev", False),
    ],
)
def test_tested_range_of_versions(version: str, tested: bool) -> None:
    assert vllm_compat.is_tested(version) is tested


def test_untested_version_is_refused_without_the_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_compat, "installed_version", lambda: "0.29.0")
    monkeypatch.delenv(vllm_compat.OVERRIDE, raising=False)
    with pytest.raises(UnsupportedVllmError) as caught:
        vllm_compat.require_tested_vllm()
    assert str(caught.value) == (
        "vLLM 0.29.0 is outside the tested range 0.31 to 0.33; "
        "install one inside it, or set VLLM_SCHED_ALLOW_UNTESTED=1 to try anyway"
    )
    monkeypatch.setenv(vllm_compat.OVERRIDE, "1")
    with pytest.warns(UserWarning, match=r"0\.29\.0 is outside"):
        vllm_compat.require_tested_vllm()


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        (
            "core.sched.scheduler.Scheduler._reserve_prefill_lookahead",
            r"Scheduler\._reserve_pre.*,",
        ),
        ("request.Request", r"a module or class \(.*'Request'"),
    ],
)
def test_missing_method_or_class_is_named(
    missing: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(f"vllm.v1.{missing}")
    with pytest.raises(UnsupportedVllmError, match=f"lacks {named}"):
        vllm_compat.require_tested_vllm()


@pytest.mark.parametrize(
    ("owner", "name", "other", "missing"),
    [
        (Scheduler, "update_from_output", lambda _, output: output, [".*(scheduler_output)"]),
        (KVCacheManager, "prefix_cache_lookup_enabled", None, [".*"]),
        (
            KVCacheCoordinator,
            "find_longest_cache_hit",
            lambda _, block_hashes, most: (block_hashes, most),
            [".*(max_cache_hit_length)"],
        ),
        (KVCacheManager, "__init__", lambda _: None, vllm_compat.KV_CACHE_MANAGER.fields),
    ],
    ids=["parameter", "method of the cache", "parameter of the cache", "fields"],
)
def test_missing_names_are_listed(
    owner: type, name: str, other: Any, missing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, other)
    names = [f"{owner.__name__}.{each.replace('.*', name)}" for each in missing]
    assert vllm_compat.missing_names() == names


def test_missing_vllm_error_names_the_package() -> None:
    code = (
        "import sys; sys.modules['vllm'] = None\n"
        "import vllm_sched\n"
        "try: vllm_sched.PolicyScheduler\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True
    )
    assert "pip install 'vllm-sched[vllm]'" in done.stdout


@pytest.mark.parametrize("arguments", [["-m", "vllm_sched.engine.server"], ["-c", SERVE]])
def test_serve_with_an_untested_vllm_prints_one_line(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("__version__ = '0.29.0'")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = {k: v for k, v in os.environ.items() if k != vllm_compat.OVERRIDE}
    done = subprocess.run(
        [sys.executable, *arguments, "some"],
        capture_output=True,
        text=True,
        env={**environment, "PYTHONPATH": path},
        cwd=tmp_path,
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert "vLLM 0.29.0 is outside the tested range" in line


ENGINE = Path(vllm_compat.__file__).parent
STEPS = sorted(path.stem for path in (ENGINE / "steps").glob("*.py"))
# The names of the scheduler in each module.
SCHEDULERS = {
    "scheduler": {"self"},
    "telemetry": {"self", "scheduler"},
    "in_flight": {"scheduler"},
    "policy_setup": {"scheduler"},
} | {f"steps/{name}": {"scheduler", "self._scheduler"} for name in STEPS}


def scheduler_attributes(module: str) -> dict[str, bool]:
    """Return the scheduler's attributes that a module uses, and whether it writes them."""
    used: dict[str, bool] = {}
    for node in ast.walk(ast.parse((ENGINE / f"{module}.py").read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in SCHEDULERS[module]:
            used[node.attr] = used.get(node.attr, False) or isinstance(node.ctx, ast.Store)
    return used


@pytest.mark.parametrize("module", SCHEDULERS)
def test_every_used_scheduler_attribute_is_checked(module: str) -> None:
    used = scheduler_attributes(module)
    upstream = {name for name in used if hasattr(Scheduler, name)} | {
        name for name in used if name in Scheduler.__init__.__code__.co_names
    }
    own = set().union(*map(vars, (PolicyMixin, TelemetryMixin, EngineStats)))
    for other in SCHEDULERS:
        own |= {name for name, written in scheduler_attributes(other).items() if written}
    assert used.keys() - own <= upstream
    names = vllm_compat.SCHEDULER
    assert upstream - {"shutdown"} <= {*names.methods, *names.fields}


@pytest.mark.parametrize("ahead", [0, 1])
def test_upstream_keeps_chunks_without_a_look_ahead_drafter(ahead: int) -> None:
    ask = Scheduler._reserve_prefill_lookahead
    scheduler: Any = SimpleNamespace(num_prefill_lookahead=ahead)
    assert not vllm_compat.looks_ahead(scheduler, ask)
    for rest in range(1, 20):
        request: Any = SimpleNamespace(num_tokens=100 + rest)
        for tokens in range(-2, rest + 1):
            assert ask(scheduler, request, 100, tokens) == max(tokens, 0)
    # In doubt it looks ahead.
    assert vllm_compat.looks_ahead(SimpleNamespace(num_prefill_lookahead=2), ask)
    assert vllm_compat.looks_ahead(SimpleNamespace(), ask)
    assert vllm_compat.looks_ahead(scheduler, lambda *_: 0)


@pytest.mark.parametrize(("ahead", "chunks"), [(0, [64, 2]), (1, [64, 2]), (4, [62, 4])])
def test_chunks_end_where_a_drafter_needs_them(
    ahead: int, chunks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VllmConfig, "num_prefill_lookahead_tokens", property(lambda _: ahead))
    for kind, policies in ((Scheduler, None), (SyncPolicyScheduler, {"long_prompt": {}})):
        scheduler = make_scheduler(policies, scheduler_cls=kind)
        scheduler.add_request(make_request(66))
        assert [sum(step(scheduler).values()) for _ in chunks] == chunks

"""Code that replaces vLLM, whose import takes seconds, in a process that needs little of it."""

from __future__ import annotations

STUBS = """
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
import vllm_sched
envs = SimpleNamespace(VLLM_USE_RUST_FRONTEND=False)
sys.modules["vllm"] = SimpleNamespace(envs=envs)
sys.modules["vllm.config"] = SimpleNamespace(ParallelConfig=object, VllmConfig=object)
# Without the package's own check of vLLM.
sys.modules["vllm_sched.engine"] = engine = ModuleType("vllm_sched.engine")
engine.__path__ = [str(Path(vllm_sched.__file__).with_name("engine"))]
"""

"""What a Python process runs first that needs little of vLLM, whose import takes seconds."""

from __future__ import annotations

STUBS = """
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
import vllm_sched
envs = SimpleNamespace(VLLM_USE_RUST_FRONTEND=False)
sys.modules["vllm"] = SimpleNamespace(envs=envs)
sys.modules["vllm.config"] = SimpleNamespace(ParallelConfig=object, VllmConfig=object)
# Without its own look at vLLM.
sys.modules["vllm_sched.engine"] = engine = ModuleType("vllm_sched.engine")
engine.__path__ = [str(Path(vllm_sched.__file__).with_name("engine"))]
"""

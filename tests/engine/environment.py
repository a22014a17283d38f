"""Variables of a process with a real engine in it. This module imports nothing that reads them."""

from __future__ import annotations

from typing import Final

# On a busy machine, two threads wait much longer for each other than they compute.
IN_PROCESS: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}

"""The only floor that imports vLLM. Check that it is one we know before anything else."""

from vllm_sched.engine.seams import require_tested_vllm

require_tested_vllm()

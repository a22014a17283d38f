"""The router in front of vLLM workers. It never imports vLLM, torch or `vllm_sched`."""

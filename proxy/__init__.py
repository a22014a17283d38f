"""The router in front of vLLM workers. It never imports vLLM, torch or `vllm_sched`."""

from proxy.compiled import places

if (_folder := places.found()) is not None:
    places.use(_folder, __path__)

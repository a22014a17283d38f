"""The router in front of vLLM workers. It never imports vLLM, torch or `vllm_sched`."""

from proxy.compiled import locate

if (_folder := locate.found()) is not None:
    locate.use(_folder, __path__)

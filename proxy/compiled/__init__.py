"""Modules of the router that `vllm-sched compile` compiles with mypyc, found at the next start.

The folder's name is a hash of the sources, so modules compiled from other sources are never used.
"""

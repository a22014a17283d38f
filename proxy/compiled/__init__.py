"""The router's own modules as machine code: made by `vllm-sched compile`, found when it starts.

mypyc translates the modules that every request goes through (`core` and `wire`) by their types.
What was made of other sources than those at hand is never used: its name is a hash of them.
"""

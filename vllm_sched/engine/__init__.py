"""The only package that imports vLLM. Its import checks vLLM's version first."""

import sys

from vllm_sched.engine.vllm_compat import require_tested_vllm
from vllm_sched.errors import UnsupportedVllmError

try:
    require_tested_vllm()
except UnsupportedVllmError as error:
    # `python -m vllm_sched.engine.server` cannot handle the error: it imports this package first.
    if sys.argv[:1] != ["-m"]:
        raise
    program = next((word for word in sys.orig_argv if word.startswith(f"{__name__}.")), __name__)
    sys.stderr.write(f"{program}: {error}\n")
    sys.exit(2)

"""The only floor that imports vLLM. Check that it is one we know before anything else."""

import sys

from vllm_sched.engine.vllm_compat import require_tested_vllm
from vllm_sched.errors import UnsupportedVllmError

try:
    require_tested_vllm()
except UnsupportedVllmError as error:
    # A program in here, `python -m vllm_sched.engine.server`, is only being looked for so far: what
    # it would do about this itself comes too late. That is when the first argument is "-m".
    if sys.argv[:1] != ["-m"]:
        raise
    program = next((word for word in sys.orig_argv if word.startswith(f"{__name__}.")), __name__)
    sys.stderr.write(f"{program}: {error}\n")
    sys.exit(2)

"""What a smaller chunk costs: every step has a part that does not depend on its chunk.

A chunk of half the size needs two steps. Its loss is the extra time for the same tokens, relative
to one step: near 0 where a chunk fills the device, and 1 where any step lasts equally long. With a
loss of LARGE_LOSS, a tenth of the smaller step is fixed cost.
"""

from __future__ import annotations

from typing import Final

from vllm_sched.cost.step_time import Chunk, StepShape, StepTime

# Accepted loss of a halved chunk; the larger one while steps exceed the target gap.
SMALL_LOSS: Final = 0.025
LARGE_LOSS: Final = 0.05
# Of the step's budget; smaller chunks are not considered.
LEAST_SHARE: Final = 1 / 64


def accepted_loss(step_s: float, itl_s: float) -> float:
    """Return the loss for which a step of this length should be halved."""
    return LARGE_LOSS if step_s > itl_s else SMALL_LOSS


def loss_against_double(loss: float) -> float:
    """Return the loss of a chunk against twice the chunk, given that of its half against it.

    This holds where a step takes a fixed time and a time per token.
    """
    return loss / (2 - loss) if loss < 1 else 1.0


def least_chunk(max_tokens: int, block_tokens: int) -> int:
    """Return the smallest chunk to consider; half of it is still a block."""
    return max(int(max_tokens * LEAST_SHARE), min(2 * block_tokens, max_tokens))


def best_chunk(
    time: StepTime, shape: StepShape, max_tokens: int, *, itl_s: float, block_tokens: int
) -> int:
    """Return the chunk without notable loss, for a step like `shape` after `read_tokens`."""

    def seconds(tokens: int) -> float:
        chunk = Chunk(tokens, shape.read_tokens)
        return time.seconds(StepShape.from_chunks([chunk], shape.decodes, shape.context_tokens))

    size, min_tokens = max_tokens, least_chunk(max_tokens, block_tokens)
    size_s = seconds(size)
    while size // 2 >= min_tokens:
        half_s = seconds(size // 2)
        if 2 * half_s > size_s * (1 + accepted_loss(size_s, itl_s)):
            break
        size, size_s = size // 2, half_s
    return size

"""The list `tenants`, and how they share what there is: `router.fairness`, `router.admission`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from proxy.config.types import LIST, Block, Count, FilePath, Name, Seconds

# It stands in metrics' labels and in logs.
TenantName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
KeyHash = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Class = Literal["interactive", "standard", "batch"]
Share = Annotated[float, Field(ge=0, lt=1)]


class LimitsConfig(Block):
    """What a tenant may ask for; no limit where none is given."""

    requests_per_minute: Count | None = Field(None, description="a minute's worth may come at once")
    tokens_per_minute: Count | None = Field(
        None,
        description="of prompts and answers; estimated when a request comes, settled at its end",
    )
    concurrency: Count | None = Field(None, description="requests in flight and waiting")
    max_prompt_tokens: Count | None = Field(None, description="of the largest prompt of a request")


class TenantConfig(Block):
    """Somebody who may use the fleet, known by keys."""

    name: TenantName = Field(description="letters, digits, '.', '_' and '-', 64 at most")
    class_: Class = Field(
        "standard",
        alias="class",
        description="interactive goes first; batch goes in the gaps that the others leave",
    )
    weight: Annotated[float, Field(ge=0.001, le=1000)] = Field(
        1.0, description="its share, against those of its class"
    )
    key_hashes: Annotated[tuple[KeyHash, ...], LIST] = Field(
        (), repr=False, description="sha256:... as `vllm-sched key` prints them"
    )
    keys_file: FilePath | None = Field(
        None, description="keys or their hashes, one a line; read at the start and at each reload"
    )
    keys_env: Variable | None = Field(
        None, description="the variable that has keys or their hashes, with spaces between"
    )
    limits: LimitsConfig = LimitsConfig()
    models: Annotated[tuple[Name, ...], LIST] | None = Field(
        None, description="those that it may use; all if not given"
    )
    explain: bool = Field(
        False, description="let it ask by X-Explain which worker serves it, and why"
    )
    cache_salt: bool = Field(
        False, description="have workers cache its prompts apart from others' (cache_salt)"
    )


class FairnessConfig(Block):
    """Who goes first where requests wait."""

    output_weight: Annotated[float, Field(ge=0)] = Field(
        2.0, description="of a token written in a tenant's share, against one of prompt"
    )
    cached_weight: Annotated[float, Field(ge=0)] = Field(
        0.0, description="of a token of prompt that should be cached"
    )
    standard_age_s: Seconds = Field(
        10.0, description="waited for, standard goes before interactive, every second time"
    )
    batch_age_s: Seconds = Field(
        300.0, description="the same for batch, before both others; two of age take turns"
    )
    batch_wait_s: Seconds = Field(600.0, description="one of batch is refused with 429 after that")
    batch_reserve: Share = Field(
        0.125, description="of a worker's places and KV cache, that batch leaves free"
    )
    batch_gap_s: Annotated[float, Field(ge=0)] = Field(
        0.5, description="of prefill that a worker may have before it when it is given one of batch"
    )


class AdmissionConfig(Block):
    """Requests that would be answered too late are refused at once; off where nothing is given."""

    ttft_s: Seconds | None = Field(
        None, description="to the first token, predicted, for classes without a figure of their own"
    )
    interactive_ttft_s: Seconds | None = Field(None, description="the same for interactive")
    standard_ttft_s: Seconds | None = Field(None, description="the same for standard")
    batch_ttft_s: Seconds | None = Field(None, description="the same for batch")

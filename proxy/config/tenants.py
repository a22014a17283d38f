"""The blocks `tenants`, `router.fairness` and `router.admission`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from proxy.config.types import LIST, Block, Count, FilePath, Label, Name, Seconds, Variable

KeyHash = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
TenantClass = Literal["interactive", "standard", "batch"]
Share = Annotated[float, Field(ge=0, lt=1)]


class LimitsConfig(Block):
    """Limits on a tenant's requests; a limit that is not given does not apply."""

    requests_per_minute: Count | None = None
    """Requests per minute; a burst may use a whole minute's requests at once"""
    tokens_per_minute: Count | None = None
    """Prompt and output tokens per minute. They are estimated when a request arrives, and
    corrected by its usage at the end"""
    concurrency: Count | None = None
    """Maximum number of requests in flight and in the queue"""
    max_prompt_tokens: Count | None = None
    """Maximum number of tokens in the largest prompt of a request"""


class TenantConfig(Block):
    """A user or application that is identified by its API keys."""

    name: Label
    """Unique name: letters, digits, '.', '_' and '-', 64 characters at most"""
    class_: TenantClass = Field("standard", alias="class")
    """Tenant class. interactive is served first, then standard. batch is served when no request
    of another class waits"""
    weight: Annotated[float, Field(ge=0.001, le=1000)] = 1.0
    """The tenant's share, relative to the other tenants of its class"""
    key_hashes: Annotated[tuple[KeyHash, ...], LIST] = Field((), repr=False)
    """Hashes of API keys, sha256:... as `vllm-sched key` prints them"""
    keys_file: FilePath | None = None
    """File with API keys or their hashes, one per line; read at the start and at each reload"""
    keys_env: Variable | None = None
    """Name of an environment variable with API keys or their hashes, separated by spaces"""
    limits: LimitsConfig = LimitsConfig()
    models: Annotated[tuple[Name, ...], LIST] | None = None
    """Models that the tenant may use; all if not given"""
    ttft_s: Seconds | None = None
    """Target for the tenant's requests, instead of the target in router.admission: seconds to
    the first token"""
    tpot_s: Seconds | None = None
    """The same: seconds per later token of a response"""
    explain: bool = False
    """Allow the X-Explain request header, which asks for the chosen worker and the reason in a
    response header"""
    cache_salt: bool = False
    """Separate the tenant's prefix cache from the caches of other tenants: the router sets
    cache_salt in its requests"""


class FairnessConfig(Block):
    """Order of the requests that wait in the queue."""

    output_weight: Annotated[float, Field(ge=0)] = 2.0
    """Cost of an output token in the tenant's share; a prompt token costs 1"""
    cached_weight: Annotated[float, Field(ge=0)] = 0.0
    """Cost of a prompt token that is expected to be cached"""
    standard_age_s: Seconds = 10.0
    """Waiting time in seconds after which every second turn goes to standard requests before
    interactive requests"""
    batch_age_s: Seconds = 300.0
    """Waiting time in seconds after which every second turn goes to batch requests before both
    other classes. If standard requests are past standard_age_s too, the two classes alternate"""
    batch_wait_s: Seconds = 600.0
    """Maximum waiting time of a batch request in seconds; after it the response is 429"""
    batch_reserve: Share = 0.125
    """Share of a worker's slots and KV cache that batch requests leave free"""
    batch_gap_s: Annotated[float, Field(ge=0)] = 0.5
    """Maximum seconds of queued prefill on a busy worker that still gets a batch request"""


class AdmissionConfig(Block):
    """Targets for the first token and for later tokens.

    A request that is predicted to miss its target for the first token is refused with 429 when it
    arrives. A class without a target is not checked.
    """

    ttft_s: Seconds | None = None
    """Maximum predicted seconds to the first token, for classes without a target of their own"""
    interactive_ttft_s: Seconds | None = None
    """The same target for interactive requests"""
    standard_ttft_s: Seconds | None = None
    """The same target for standard requests"""
    batch_ttft_s: Seconds | None = None
    """The same target for batch requests"""
    tpot_s: Seconds | None = None
    """Seconds per later token, for classes without a target of their own. Requests are counted
    by it in the metrics, and router.pass_targets sends it to workers"""
    interactive_tpot_s: Seconds | None = None
    """The same target for interactive requests"""
    standard_tpot_s: Seconds | None = None
    """The same target for standard requests"""
    batch_tpot_s: Seconds | None = None
    """The same target for batch requests"""

"""The fleet file's root, and the blocks `router`, `routing` and `transfer`, with all defaults.

Rules for one field are here; rules for several fields are in `checks`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from proxy.config.admin import AdminConfig
from proxy.config.batches import BatchesConfig
from proxy.config.shared import SharedConfig
from proxy.config.telemetry import LogsConfig, TracingConfig
from proxy.config.tenants import AdmissionConfig, FairnessConfig, TenantConfig
from proxy.config.tls import TlsConfig, WorkerTlsConfig
from proxy.config.types import KIB, LIST, MIB, Block, Count, FilePath, Name, Port, Seconds, says
from proxy.config.workers import DiscoveryConfig, PoolConfig, WorkerConfig

MAX_PROCESSES = 64


def _require_workers(
    workers: tuple[WorkerConfig, ...], info: ValidationInfo
) -> tuple[WorkerConfig, ...]:
    # Not min_length: it counts only valid workers. Discovery makes an empty list valid.
    if not workers and info.data.get("discovery", "invalid") is None:
        raise ValueError("at least one worker is required")
    return workers


class QueueConfig(Block):
    """Limits on the requests that wait in the router for a free slot on a worker."""

    max_requests: Annotated[int, Field(ge=0)] = 1024
    """Maximum number of waiting requests; 0 disables the queue"""
    max_bytes: Count = 256 * MIB
    """Maximum size in bytes of the bodies of all waiting requests"""
    max_tokens: Count | None = None
    """Maximum number of prompt tokens of all waiting requests; no limit if not given"""
    max_wait_s: Seconds = 30.0
    """Maximum waiting time of a request in seconds; after it the response is 429"""


class TimeoutConfig(Block):
    """Time limits for workers and clients."""

    connect_s: Seconds = 3.0
    """Seconds to open a connection to a worker"""
    first_byte_s: Seconds = 600.0
    """Seconds until a worker begins its response; then the request is retried (router.retries), or
    the response is 504. A response that is not a stream gets additional time: four times the
    predicted time for the output limit of the request, and more while the worker is seen to
    compute, up to twice first_byte_s in all; then no other worker is tried. If probes find the
    worker down, and another worker takes the request, the limit is 10 s"""
    prefill_s: Seconds = 20.0
    """Seconds until a prefill worker responds, in addition to four times the predicted prefill
    time; then another worker is tried"""
    idle_s: Seconds = 300.0
    """Seconds between two pieces of a worker's response"""
    client_idle_s: Seconds = 75.0
    """Seconds between two requests on a client's connection, and between two pieces of a request
    body"""
    client_header_s: Seconds = 10.0
    """Seconds for the header of a request to arrive"""
    body_min_bytes_per_s: Annotated[int, Field(ge=0)] = 1024
    """Minimum average rate of a request body in bytes per second, after the first client_idle_s;
    a slower body is refused with 408, and its connection is closed. 0 allows any rate"""
    request_s: Seconds | None = None
    """Seconds for a whole request, from the first byte of its header to the last byte of its
    response, including the queue, both legs and retries; no limit if not given. At the limit,
    the worker's request is cancelled. The client gets 408 if its request has not arrived, 504 if
    the response has not begun, and an error event if a stream has begun. Lines of batches and
    responses of the Files and Batches API have no limit; an upload to /v1/files must arrive
    within it"""


class RetryConfig(Block):
    """Retries on other workers, after a failure before the first byte of a response."""

    attempts: Annotated[int, Field(ge=1, le=10)] = 3
    """Maximum number of attempts per request, including the first; 2 if both workers closed the
    connection without a response. Workers that accept no connection do not count"""
    budget: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Retries allowed per request of the last 10 s; at least 10 are allowed. The budget protects
    a fleet that fails as a whole. Requests that a worker had when it began to fail are retried
    once outside the budget, until half of the fleet has failed in this way. 0 disables
    retries, but not those of connections that a worker did not accept"""


class ProbeConfig(Block):
    """Health checks of workers."""

    interval_s: Seconds = 1.0
    """Seconds between two probes of a worker"""
    timeout_s: Seconds = 2.0
    """Seconds after which a probe has failed"""
    down_after: Count = 3
    """Consecutive failed probes after which a worker is down"""
    up_after: Count = 2
    """Consecutive successful probes after which a down worker is up again"""


class JournalConfig(Block):
    """How the router reads the workers' journals."""

    key_file: FilePath | None = None
    """File with the secret that signs the journals, the same as the engines' journal.key_file,
    which `vllm-sched up` sets; read at the start and at each reload. Messages without a valid
    signature are dropped. If not given, signatures are not checked"""


class RouterConfig(Block):
    """The router itself."""

    host: Name = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all IPv4 interfaces"""
    port: Port = 8000
    """Port to listen on; 0 selects a free port"""
    tls: TlsConfig | None = None
    """Certificate of the clients' port; plain HTTP if not given"""
    admin: AdminConfig = AdminConfig()
    max_body_bytes: Count = 64 * MIB
    """Maximum size in bytes of one request body"""
    max_header_bytes: Annotated[int, Field(ge=KIB)] = 64 * KIB
    """Maximum size in bytes of one request header"""
    drain_s: Annotated[float, Field(ge=0)] = 30.0
    """Seconds that requests have to finish after the router is told to stop"""
    processes: Annotated[
        Annotated[int, Field(ge=1, le=MAX_PROCESSES)] | Literal["auto"],
        says(f"must be a number from 1 to {MAX_PROCESSES}, or auto"),
    ] = 1
    """Number of router processes that serve the port together. auto: one per processor that the
    router may use, 8 at most"""
    drain_notice_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds at the start of drain_s, less than drain_s, in which /ready returns 503 while the
    router still serves everything. A load balancer that polls /ready has time to notice before
    connections are refused. Responses in this time close the client's connection; idle connections
    are closed at its end"""
    queue: QueueConfig = QueueConfig()
    timeouts: TimeoutConfig = TimeoutConfig()
    retries: RetryConfig = RetryConfig()
    probe: ProbeConfig = ProbeConfig()
    journal: JournalConfig = JournalConfig()
    shared: SharedConfig | None = None
    """Where replicas of this router share their state; without it each replica knows its own
    requests only"""
    continuation: Annotated[bool | Literal["text"], says("must be true, false or text")] = True
    """Continue streams on another worker when theirs fails, if they continue exactly: those of
    workers with a journal. `text`: continue other chats and completions too, from the text that
    the client has (see docs/continuation.md)"""
    batches: BatchesConfig = BatchesConfig()
    logs: LogsConfig = LogsConfig()
    tracing: TracingConfig | None = None
    """Where to send traces of requests; no traces if not given"""
    fairness: FairnessConfig = FairnessConfig()
    admission: AdmissionConfig = AdmissionConfig()
    max_collected_bytes: Count = 512 * MIB
    """Maximum size in bytes of all request bodies that one process holds; beyond it the response
    is 503. A body is held until its worker begins the response (that of a stream which may be
    continued until its end, while half is free), an upload until it is stored. A quarter is
    divided equally among the tenants. Of the rest, a tenant may use no more than it leaves free;
    beyond that the response is 429"""
    allow_anonymous: bool = False
    """Without tenants, accept requests from any client that reaches the port"""
    isolate_caches: bool = False
    """Separate the prefix caches of all tenants: the router sets cache_salt in their requests"""
    pass_priority: bool = False
    """Send the tenant's class to workers as priority: -1 for interactive, 0 for standard, 1 for
    batch. Workers must run the lanes policy, or --scheduling-policy priority"""
    pass_targets: bool = False
    """Send workers what is left of a request's time to its first token, and its target per later
    token, in vllm_xargs. The policies lanes and chunk_budget use them"""
    client_deadlines: bool = True
    """Heed the header X-Request-Deadline-Ms: the milliseconds that a request has until its first
    token. If false, the header is ignored"""
    client_fields: Annotated[tuple[Literal["priority", "vllm_xargs"], ...], LIST] = ()
    """Fields that tenants' requests may set themselves. Otherwise the router removes priority,
    and refuses vllm_xargs"""
    allow_client_kv_transfer: bool = False
    """Accept fields for KV transfers from clients. A client can then read other clients' prompts
    and have a worker connect to any address"""


class RoutingConfig(Block):
    """How the router chooses a worker."""

    policy: Literal["adaptive", "length", "least_loaded", "round_robin"] = "adaptive"
    """Routing rule"""
    short_limit: Count = 10_000
    """Number of prompt and output tokens together above which a request is long"""
    prefix_affinity: bool = True
    """Prefer workers that have the beginning of the prompt cached"""
    tokenize: bool = True
    """Have a worker count the tokens of a short body when the router's estimate is too near a
    limit to decide"""
    cut_output: bool = False
    """Send a request with an output limit that does not fit next to its prompt to the worker
    with the largest context, which reduces the output limit as vLLM does. If false, the response
    is 400"""
    panic_threshold: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of a model's workers with a closed breaker, below which the router ignores breakers
    and also uses workers with an open breaker. Workers that report that they are busy, and
    workers that probes find down, stay excluded. 0: breakers are never ignored"""
    disaggregate_above: Annotated[
        Annotated[int, Field(ge=0)] | Literal["auto"],
        says("must be a whole number of tokens, 0 or more, or auto"),
    ] = "auto"
    """Number of uncached prompt tokens above which a prefill worker prefills the prompt instead
    of the decode worker; 0: every prompt. auto: if the hand-over is predicted to cost all
    requests together less time"""


class TransferConfig(Block):
    """vLLM's KV connector, which moves a prompt's KV cache from prefill to decode workers."""

    connector: Literal["nixl", "shared-storage", "mooncake", "lmcache"]
    """Connector that the workers run"""
    mode: Literal["pull", "push"] = "pull"
    """For nixl only. pull: the decode worker reads the blocks. push: the prefill worker writes
    them"""
    path: Name | None = None
    """For shared-storage only: a folder that all workers can access"""
    lease_s: Annotated[float, Field(ge=6)] | None = None
    """Seconds for which a prefill worker keeps blocks that no decode worker has read. It must
    not exceed the workers' kv_lease_duration, which `up` sets to twice this value. If not given:
    30 for nixl, no limit for other connectors"""
    addresses: dict[str, Name] = Field(default_factory=dict)
    """The connector's address on each worker, by worker name. mooncake: http://host:port of a
    prefill worker's bootstrap server, if its port is not 8998. lmcache:
    host:init_port:alloc_port of a decode worker that prefill workers push to"""
    warmup: bool = True
    """Connect each prefill worker to each decode worker before clients' requests need the
    connection. Until a pair is connected, the router makes no hand-over between the two"""


def as_block(transfer: object) -> object:
    """Return the block that a connector's name is short for."""
    return {"connector": transfer} if isinstance(transfer, str) else transfer


class FleetConfig(Block):
    """A whole fleet file."""

    model: Name
    """Model name that clients use, for workers without a model of their own"""
    # Before `workers`: `_require_workers` reads it.
    discovery: DiscoveryConfig | None = None
    """How to discover workers that come and go; none if not given"""
    workers: Annotated[tuple[WorkerConfig, ...], LIST, AfterValidator(_require_workers)]
    """The vLLM servers; with discovery the list may be left out"""
    tenants: Annotated[tuple[TenantConfig, ...], LIST] = ()
    """Tenants and their API keys; without tenants no key is required"""
    worker_tls: WorkerTlsConfig | None = None
    """TLS settings for workers with an https:// URL and no tls of their own"""
    router: RouterConfig = RouterConfig()
    routing: RoutingConfig = RoutingConfig()
    transfer: Annotated[TransferConfig | None, BeforeValidator(as_block)] = None
    """KV connector between prefill and decode workers. `transfer: nixl` is short for a block
    with only the connector"""

    @model_validator(mode="before")
    @classmethod
    def _default_workers(cls, data: Any) -> Any:
        """Make `workers` optional in a file with discovery."""
        if isinstance(data, dict) and data.get("discovery") is not None:
            return {"workers": [], **data}
        return data

    def tls_of(self, worker: WorkerConfig) -> WorkerTlsConfig | None:
        """Return the TLS settings for a worker; None for plain HTTP."""
        if worker.url is None or not worker.url.startswith("https://"):
            return None
        nothing = WorkerTlsConfig()
        own = None if worker.tls == nothing else worker.tls
        return own or self.worker_tls or nothing

    @property
    def pools(self) -> tuple[PoolConfig, ...]:
        return self.discovery.pools if self.discovery else ()

    def model_of(self, worker: WorkerConfig | PoolConfig) -> str:
        """Return the name that clients use for this worker's model."""
        return worker.model or self.model

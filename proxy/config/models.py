"""What a fleet file may say, and what holds where it says nothing.

Rules that one field can tell are here; those that take two are in `checks`.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from proxy.config.admin import AdminConfig
from proxy.config.batches import BatchesConfig
from proxy.config.logs import LogsConfig
from proxy.config.tenants import AdmissionConfig, FairnessConfig, TenantConfig
from proxy.config.tls import TlsConfig, WorkerTlsConfig
from proxy.config.tracing import TracingConfig
from proxy.config.types import (
    KIB,
    LAST_PORT,
    LIST,
    MIB,
    Block,
    Count,
    FilePath,
    Key,
    Name,
    Port,
    Seconds,
)

PORTS = {"http": 80, "https": 443}
MOST_PROCESSES = 64
HOST = re.compile(r"[\w.:-]+", re.ASCII)
QUERY = re.compile(r"(?<=[?#]).+")


def _worker_url(url: str) -> str:
    """Check that it is `https://host:port` or like it; return it as that."""
    parts = urlsplit(url)
    example = "write it as http://host:port"
    if parts.scheme not in PORTS:
        raise ValueError(f"only http:// and https:// are spoken to workers; {example}")
    if parts.username is not None:
        raise ValueError("credentials in it would not be sent; give the key as api_key")
    if parts.path.strip("/") or parts.query or parts.fragment:
        rest = QUERY.sub("...", url.partition(parts.netloc)[2])  # there may be a key in it
        raise ValueError(f"paths are those of the client's requests; leave out {rest!r}")
    if not _names_host(parts.hostname or ""):
        raise ValueError(f"no host in it; {example}")
    try:
        port = parts.port
    except ValueError:
        raise ValueError(f"the port must be 1 to 65535; {example}") from None
    if port == 0:
        raise ValueError(f"nobody listens on port 0; {example}")
    # Without blanks, and its scheme in small letters: by that it is told whether TLS is spoken.
    return f"{parts.scheme}://{parts.netloc}"


def _names_host(text: str) -> bool:
    """Whether it is an address, or could be a name: the system can't even look up all others."""
    try:
        text.encode("idna")  # no part of it may be empty, or longer than 63 letters
    except UnicodeError:
        return False
    return HOST.fullmatch(text) is not None


def _dns_name(name: str) -> str:
    if not _names_host(name):
        raise ValueError("is no host's name; write it alone, as vllm-short.models.svc")
    return name


def _some(workers: tuple[WorkerConfig, ...], info: ValidationInfo) -> tuple[WorkerConfig, ...]:
    # Not min_length: that counts only those without a mistake. And those that are discovered count.
    if not workers and info.data.get("discovery", "has a mistake") is None:
        raise ValueError("at least one is needed")
    return workers


def _some_pools(pools: tuple[PoolConfig, ...]) -> tuple[PoolConfig, ...]:
    if not pools:
        raise ValueError("at least one is needed; leave out discovery where there is none")
    return pools


def _processes(number: int | str) -> int | str:
    if number != "auto" and not (isinstance(number, int) and 1 <= number <= MOST_PROCESSES):
        raise ValueError(f"give a number from 1 to {MOST_PROCESSES}, or auto")
    return number


def _above(tokens: object) -> object:
    if tokens != "auto" and not (type(tokens) is int and tokens >= 0):
        raise ValueError("give a whole number of tokens, 0 or more, or auto")
    return tokens


def _api_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.path.strip("/"):
        raise ValueError("write it as https://host:port")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError("leave out what is not host and port; credentials go into token_file")
    return url.rstrip("/")


# They stand in headers, in metrics' labels and in the names of log files.
WorkerName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Url = Annotated[str, AfterValidator(_worker_url)]
DnsName = Annotated[str, AfterValidator(_dns_name)]
ApiUrl = Annotated[str, AfterValidator(_api_url)]
WorkerRole = Literal["short", "long", "general", "prefill", "decode"]


class LaunchConfig(Block):
    """How `vllm-sched up` starts a worker on this machine."""

    model: Name | None = Field(
        None, description="what to load, if not what it is served as; tiny is the built-in one"
    )
    args: Annotated[tuple[str, ...], LIST] = Field((), description="flags for vLLM")
    policies: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="scheduling policies and their settings; without one it is vLLM's scheduler",
    )
    cpus: Annotated[tuple[Annotated[int, Field(ge=0)], ...], LIST] = Field(
        (), description="processors it is bound to"
    )
    env: dict[str, str] = Field(
        default_factory=dict, description="environment variables, beyond our own"
    )


class WorkerConfig(Block):
    """One vLLM server."""

    name: WorkerName = Field(description="letters, digits, '.', '_' and '-', 64 at most")
    role: WorkerRole = Field("general", description="what it is for")
    url: Url | None = Field(None, description="http://host:port; with launch, a free port if none")
    model: Name | None = Field(None, description="what clients call its model, if not the fleet's")
    max_model_len: Count | None = Field(
        None, description="asked of the worker; stated here it may be less than that, not more"
    )
    max_requests: Count | None = Field(
        None,
        description="in flight at once, of all processes; no own limit if none; `adaptive` keeps a "
        "quarter of a long worker's, one at least, for longs until a minute or two after the last: "
        "with 1, shorts come there meanwhile only if no other worker is left for them",
    )
    api_key: Key | None = Field(
        None, repr=False, description="sent to this worker in place of the client's Authorization"
    )
    tls: WorkerTlsConfig | None = Field(
        None, description="for an https:// URL; worker_tls, at the top of the file, if not given"
    )
    launch: LaunchConfig | None = Field(None, description="how `vllm-sched up` starts it")
    profile: Name | None = Field(
        None,
        description="what `vllm-sched simulate` takes it to be: a machine's name, or the file that "
        "`calibrate` saved, looked for beside the fleet file first",
    )

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port of its URL."""
        if self.url is None:
            return None
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or PORTS[parts.scheme]

    @property
    def stated_max_model_len(self) -> int | None:
        """The context length that the file tells, be it only among the flags."""
        return self.max_model_len or self.flag_max_model_len

    @property
    def flag_max_model_len(self) -> int | None:
        """The context length that it is launched with, where that is a plain number."""
        return self._number_of("--max-model-len")

    @property
    def seats(self) -> int | None:
        """How many sequences its engines run at once, where it is launched with a plain number."""
        seats = self._number_of("--max-num-seqs")
        engines = self._number_of("--data-parallel-size", "-dp")
        return seats * (engines or 1) if seats else None

    def _number_of(self, *names: str) -> int | None:
        """Return the flag that it is launched with, where that is a plain number."""
        flags = " ".join(self.launch.args if self.launch else ()).replace("=", " ").split()
        values = [
            value
            for flag, value in itertools.pairwise(flags)
            if flag.replace("_", "-") in names and value.isascii() and value.isdigit()
        ]
        return int(values[-1]) if values else None


class PoolConfig(Block):
    """Workers that are alike, and come and go: where to look for them, and what they are."""

    name: WorkerName = Field(description="in logs, and in names of workers known by address alone")
    selector: Name | None = Field(
        None,
        description="labels of the EndpointSlices, such as kubernetes.io/service-name=vllm-short",
    )
    dns: DnsName | None = Field(
        None, description="a name that resolves to every worker, as a headless Service's does"
    )
    port: Annotated[int, Field(ge=1, le=LAST_PORT)] | Name | None = Field(
        None,
        description="where they listen: a number, or with selector a port's name; "
        "8000, or the EndpointSlice's only port, if not given",
    )
    role: WorkerRole = Field("general", description="what they are for")
    model: Name | None = Field(None, description="what clients call their model, if not as above")
    max_model_len: Count | None = Field(
        None, description="asked of each worker; stated here it may be less than that, not more"
    )
    max_requests: Count | None = Field(
        None, description="in flight at once, on each: see `workers`"
    )
    api_key: Key | None = Field(
        None, repr=False, description="sent to them in place of the client's Authorization"
    )
    api_key_file: FilePath | None = Field(
        None, description="a file with that key, read at the start and at each reload"
    )
    tls: WorkerTlsConfig | None = Field(
        None, description="spoken to them; {} for what worker_tls says; plain HTTP if not given"
    )

    @property
    def scheme(self) -> str:
        """How the URLs of its workers begin."""
        return "http" if self.tls is None else "https"

    def worker(self, name: str, url: str | None, api_key: str | None = None) -> WorkerConfig:
        """Describe one of them."""
        alike = self.model_dump(include=set(WorkerConfig.model_fields) - {"name", "url"})
        return WorkerConfig(**alike | {"name": name, "url": url, "api_key": api_key})


class KubernetesConfig(Block):
    """The API server. In a pod nothing of this need be said."""

    url: ApiUrl | None = Field(None, description="the pod's own cluster if not given")
    namespace: Name | None = Field(None, description="of the workers; the pod's own if not given")
    token_file: FilePath = Field(
        Path("/var/run/secrets/kubernetes.io/serviceaccount/token"),
        description="read anew for each request; none is sent if there is no such file",
    )
    ca_file: FilePath = Field(
        Path("/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"),
        description="whom to trust; the system's own if there is no such file",
    )
    watch_s: Annotated[float, Field(ge=1)] = Field(
        30.0, description="that a watch lasts; one that does not end then is taken to be dead"
    )
    resync_s: Seconds = Field(300.0, description="after which everything is listed again")


class DiscoveryConfig(Block):
    """Workers that the router finds by itself."""

    pools: Annotated[tuple[PoolConfig, ...], LIST, AfterValidator(_some_pools)] = Field(
        description="which workers, and what they are for"
    )
    kubernetes: KubernetesConfig = KubernetesConfig()
    dns_every_s: Seconds = Field(5.0, description="between two look-ups of a name")


class QueueConfig(Block):
    """Requests that wait in the router for a worker with room."""

    max_requests: Annotated[int, Field(ge=0)] = Field(1024, description="0: nobody waits")
    max_bytes: Count = Field(256 * MIB, description="of their bodies together")
    max_tokens: Count | None = Field(
        None,
        description="of their prompts together; without it the queue is bounded by the other three",
    )
    max_wait_s: Seconds = Field(30.0, description="refused with 429 after that")


class TimeoutConfig(Block):
    """How long silence is borne."""

    connect_s: Seconds = Field(3.0, description="until a worker takes the connection")
    first_byte_s: Seconds = Field(
        600.0,
        description="until a worker begins its answer; one that is no stream has besides four "
        "times as long as the tokens that the client asks for are predicted to take, and more "
        "while its worker is seen to compute, up to as long again: then 504, and no other worker "
        "is asked. Once probes have called its worker down it has 10 s, where another takes it",
    )
    prefill_s: Seconds = Field(
        20.0,
        description="until a prefill worker has answered, beyond four times what is predicted; "
        "then another worker is asked",
    )
    idle_s: Seconds = Field(300.0, description="between two pieces of an answer")
    client_idle_s: Seconds = Field(
        75.0, description="between two requests of a connection, or two pieces of a body"
    )
    client_header_s: Seconds = Field(10.0, description="for a request's header to arrive")
    body_min_bytes_per_s: Annotated[int, Field(ge=0)] = Field(
        1024,
        description="at which a body must arrive, on average, after its first client_idle_s: else "
        "408, and the connection is closed; 0: any rate",
    )
    request_s: Seconds | None = Field(
        None,
        description="for a whole request, from the first byte of its header to the last byte of "
        "its answer, with its wait, both legs and retries. Then it is 408 while it arrives, 504 "
        "before its answer begins, and an error event in a stream that has begun; its worker is "
        "told to stop. No limit if not given. Lines of batches and answers about files and batches "
        "have none; an upload to /v1/files must arrive within it",
    )


class RetryConfig(Block):
    """Other workers, where one failed before the first byte."""

    attempts: Annotated[int, Field(ge=1, le=10)] = Field(
        3,
        description="per request, the first one included; 2 where both workers closed the "
        "connection without an answer",
    )
    budget: Annotated[float, Field(ge=0, le=1)] = Field(
        0.2,
        description="retries per request of the last 10 s, and 10 at least: a failing fleet is not "
        "hit harder. Those a worker had when it began to fail need none of it, once each, until "
        "half of the fleet has failed so; 0: nothing is tried again",
    )


class ProbeConfig(Block):
    """How the health of workers is watched."""

    interval_s: Seconds = Field(1.0, description="between two probes of a worker")
    timeout_s: Seconds = Field(2.0, description="after which a probe has failed")
    down_after: Count = Field(3, description="failed probes in a row")
    up_after: Count = Field(2, description="good probes in a row, once it was down")


class RouterConfig(Block):
    """The router itself."""

    host: Name = Field("127.0.0.1", description="0.0.0.0 for all networks")
    port: Port = Field(8000, description="0 is any free one")
    tls: TlsConfig | None = Field(None, description="the certificate that clients are shown")
    admin: AdminConfig = AdminConfig()
    max_body_bytes: Count = Field(64 * MIB, description="of one request")
    max_header_bytes: Annotated[int, Field(ge=KIB)] = Field(64 * KIB, description="of one request")
    drain_s: Annotated[float, Field(ge=0)] = Field(
        30.0, description="that requests have to finish when the router is told to stop"
    )
    processes: Annotated[int | str, AfterValidator(_processes)] = Field(
        1,
        description="that serve on the port, sharing what they know; auto: one for each processor "
        "that the router may use, 8 at most",
    )
    drain_notice_s: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="of those, in which /ready says 503 and all is served still: so that a load "
        "balancer that asks it has heard before connections are refused, and who keeps one hears "
        "with its next answer to take another; those that are idle at its end are closed",
    )
    queue: QueueConfig = QueueConfig()
    timeouts: TimeoutConfig = TimeoutConfig()
    retries: RetryConfig = RetryConfig()
    probe: ProbeConfig = ProbeConfig()
    batches: BatchesConfig = BatchesConfig()
    logs: LogsConfig = LogsConfig()
    tracing: TracingConfig | None = Field(None, description="where traces of requests are sent")
    fairness: FairnessConfig = FairnessConfig()
    admission: AdmissionConfig = AdmissionConfig()
    max_collected_bytes: Count = Field(
        512 * MIB,
        description="of all bodies that one process holds: until they are whole and their worker "
        "answers, uploads until they are kept; beyond it 503. Of a quarter each tenant has an "
        "equal part to itself; of the rest no more than is left free beside its own (429)",
    )
    allow_anonymous: bool = Field(
        False, description="without tenants, let whoever reaches the port use the fleet"
    )
    isolate_caches: bool = Field(
        False, description="have workers cache each tenant's prompts apart (cache_salt)"
    )
    pass_priority: bool = Field(
        False,
        description="tell workers a tenant's class as priority: -1 interactive, 1 batch; they must "
        "run the lanes policy, or --scheduling-policy priority",
    )
    client_fields: Annotated[tuple[Literal["priority", "vllm_xargs"], ...], LIST] = Field(
        (), description="what tenants may say to the engine themselves"
    )
    allow_client_kv_transfer: bool = Field(
        False,
        description="let clients steer KV transfers themselves: they can then read each other's "
        "prompts and have a worker connect to any address",
    )


class RoutingConfig(Block):
    """How a worker is chosen."""

    policy: Literal["adaptive", "length", "least_loaded", "round_robin"] = Field(
        "adaptive", description="the rule"
    )
    short_limit: Count = Field(
        10_000, description="tokens of prompt and output together above which a request is long"
    )
    prefix_affinity: bool = Field(True, description="prefer whoever has the prompt's start cached")
    tokenize: bool = Field(
        True, description="near a limit, have a worker count the tokens of a short body"
    )
    cut_output: bool = Field(
        False,
        description="have the worker with the largest context cut an output limit for which no "
        "context has room beside the prompt, as vLLM alone does; else that is 400",
    )
    panic_threshold: Annotated[float, Field(ge=0, le=1)] = Field(
        0.5,
        description="share of a model's workers with a closed breaker, below which requests go to "
        "workers with an open one too: so breakers keep out no more than the rest of that share. "
        "A worker that says it is busy, or is down by its probes, stays out; 0: breakers are "
        "always heeded",
    )
    disaggregate_above: Annotated[
        Annotated[int, Field(ge=0)] | Literal["auto"], BeforeValidator(_above)
    ] = Field(
        "auto",
        description="tokens a decode worker would have to prefill, above which a prefill worker "
        "does it; 0: all prompts; auto: where that is predicted to cost everybody less time",
    )


class TransferConfig(Block):
    """What moves a prompt's KV cache from prefill to decode workers; vLLM's connector."""

    connector: Literal["nixl", "shared-storage", "mooncake", "lmcache", "p2p-nccl"] = Field(
        description="as the workers run it"
    )
    mode: Literal["pull", "push"] = Field("pull", description="nixl only: who moves the bytes")
    path: Name | None = Field(
        None, description="shared-storage only: a folder that all its workers see"
    )
    lease_s: Annotated[float, Field(ge=6)] | None = Field(
        None,
        description="for which a prefill worker keeps blocks that nobody fetches: no more than the "
        "workers' kv_lease_duration; `up` gives its workers twice as much; nixl: 30 if not given",
    )
    addresses: dict[str, Name] = Field(
        default_factory=dict,
        description="where workers listen for it, by name: p2p-nccl host:port of each; mooncake "
        "http://host:port of a prefill worker's bootstrap server, if it isn't port 8998; lmcache "
        "host:init_port:alloc_port of a decode worker, if prefill workers push to it",
    )
    warmup: bool = Field(
        True,
        description="connect each prefill to each decode worker before users need it; until that "
        "is done, nothing is handed over between the two",
    )


def _transfer(value: object) -> object:
    """Take `nixl` for `connector: nixl`."""
    return {"connector": value} if isinstance(value, str) else value


class FleetConfig(Block):
    """A whole fleet file."""

    model: Name = Field(description="the name clients use; workers may name their own")
    # Before the workers: where there is this, there need be none of those.
    discovery: DiscoveryConfig | None = Field(
        None, description="where to find workers that come and go"
    )
    workers: Annotated[tuple[WorkerConfig, ...], LIST, AfterValidator(_some)] = Field(
        description="the vLLM servers"
    )
    tenants: Annotated[tuple[TenantConfig, ...], LIST] = Field(
        (), description="who may use it; without any, nobody is asked for a key"
    )
    worker_tls: WorkerTlsConfig | None = Field(
        None, description="for workers with an https:// URL and no tls of their own"
    )
    router: RouterConfig = RouterConfig()
    routing: RoutingConfig = RoutingConfig()
    transfer: Annotated[TransferConfig | None, BeforeValidator(_transfer)] = Field(
        None, description="the connector between prefill and decode workers, as in transfer: nixl"
    )

    @model_validator(mode="before")
    @classmethod
    def _discovered(cls, data: Any) -> Any:
        """Let the workers be left out where they are discovered."""
        if isinstance(data, dict) and data.get("discovery") is not None:
            return {"workers": [], **data}
        return data

    def tls_of(self, worker: WorkerConfig) -> WorkerTlsConfig | None:
        """Return how a worker is met; None for plain HTTP."""
        if worker.url is None or not worker.url.startswith("https://"):
            return None
        nothing = WorkerTlsConfig()
        own = None if worker.tls == nothing else worker.tls
        return own or self.worker_tls or nothing

    def model_of(self, worker: WorkerConfig) -> str:
        """Return the name that clients use for what this worker serves."""
        return worker.model or self.model

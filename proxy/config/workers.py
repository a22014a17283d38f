"""The blocks `workers` and `discovery`: vLLM servers, and where the router finds them."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from proxy.config import types
from proxy.config.tls import WorkerTlsConfig
from proxy.config.types import (
    LAST_PORT,
    LIST,
    Block,
    Count,
    FilePath,
    Key,
    Label,
    Name,
    Seconds,
    says,
)

DEFAULT_PORTS = {"http": 80, "https": 443}
# Host names that listen on the same ports of this machine.
LOCAL_HOSTS = frozenset({"127.0.0.1", "localhost", "::1", "0.0.0.0", "::"})  # noqa: S104 - only compared
MAX_SOCKET_PATH_BYTES = 107  # of a Unix socket
HOST = re.compile(r"[\w.:-]+", re.ASCII)
AUTO = "auto"  # `up` chooses the journal's address
QUERY = re.compile(r"(?<=[?#]).+")


def _worker_url(url: str) -> str:
    """Return the URL as `scheme://host:port`; raise `ValueError` if it has any other part."""
    parts = urlsplit(url)
    example = "write it as http://host:port"
    if parts.scheme not in DEFAULT_PORTS:
        raise ValueError(f"only http:// and https:// are supported; {example}")
    if parts.username is not None:
        raise ValueError("credentials in a URL are not sent; give the key as api_key")
    if parts.path.strip("/") or parts.query or parts.fragment:
        rest = QUERY.sub("...", url.partition(parts.netloc)[2])  # the query may hold a key
        raise ValueError(f"the path comes from the client's request; leave out {rest!r}")
    if not _names_host(parts.hostname or ""):
        raise ValueError(f"has no host; {example}")
    try:
        port = parts.port
    except ValueError:
        raise ValueError(f"the port must be 1 to 65535; {example}") from None
    if port == 0:
        raise ValueError(f"port 0 can't be connected to; {example}")
    # urlsplit strips blanks and lower-cases the scheme: `tls_of` compares the scheme.
    return f"{parts.scheme}://{parts.netloc}"


def _journal_endpoint(endpoint: str) -> str:
    """Return the address of an engine's journal; raise `ValueError` if none can connect to it."""
    if endpoint == AUTO:
        return endpoint
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc" and rest.startswith("/"):
        if len(rest.encode()) > MAX_SOCKET_PATH_BYTES:
            raise ValueError(f"the path has more than {MAX_SOCKET_PATH_BYTES} bytes; shorten it")
        return endpoint
    example = "write it as tcp://host:port or ipc:///path"
    host, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not colon:
        raise ValueError(example)
    if host in ("*", "0.0.0.0", "[::]"):  # noqa: S104 - only compared
        raise ValueError(f"{host} can't be connected to; give the worker's host")
    bracketed = host.startswith("[") and host.endswith("]")
    if not _names_host(host[1:-1] if bracketed else host) or (":" in host) != bracketed:
        raise ValueError(f"has no valid host; {example}")
    if not (port.isascii() and port.isdigit() and 0 < int(port) <= LAST_PORT):
        raise ValueError(f"the port must be 1 to {LAST_PORT}; {example}")
    return endpoint


def _as_list(endpoints: object) -> object:
    return [endpoints] if isinstance(endpoints, str) else endpoints


def _names_host(text: str) -> bool:
    try:
        text.encode("idna")  # refuses an empty label and a label of more than 63 characters
    except UnicodeError:
        return False
    return HOST.fullmatch(text) is not None


def _dns_name(name: str) -> str:
    if not _names_host(name):
        raise ValueError("is not a host name; write the name alone, as in vllm-short.models.svc")
    return name


def _require_pools(pools: tuple[PoolConfig, ...]) -> tuple[PoolConfig, ...]:
    if not pools:
        raise ValueError("at least one pool is required; leave out discovery if there is none")
    return pools


def _api_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.path.strip("/"):
        raise ValueError("write it as https://host:port")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError("give only the host and the port; credentials go into token_file")
    return url.rstrip("/")


Url = Annotated[str, AfterValidator(_worker_url)]
DnsName = Annotated[str, AfterValidator(_dns_name)]
ApiUrl = Annotated[str, AfterValidator(_api_url)]
JournalEndpoint = Annotated[str, AfterValidator(_journal_endpoint)]
WorkerRole = Literal["short", "long", "general", "prefill", "decode"]

NAME_RULE = "letters, digits, '.', '_' and '-', 64 characters at most"


def address_of(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or DEFAULT_PORTS[parts.scheme]


def server_at(host: str, port: int) -> tuple[str, int]:
    """Return the same value for all names of this machine."""
    return ("here" if host in LOCAL_HOSTS else host.lower(), port)


class LaunchConfig(Block):
    """How `vllm-sched up` starts a worker on this machine."""

    model: Name | None = None
    """Model to load; the worker's served model name if not given. `tiny` is the built-in test
    model"""
    args: Annotated[tuple[str, ...], LIST] = ()
    """Command-line arguments for `vllm serve`"""
    policies: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Scheduling policies by name, each with its settings. If empty, the worker runs vLLM's own
    scheduler"""
    cpus: Annotated[tuple[Annotated[int, Field(ge=0)], ...], LIST] = ()
    """Processors that the worker is bound to; all if empty"""
    env: dict[types.Variable, str] = Field(default_factory=dict)
    """Environment variables, added to the environment of `vllm-sched up`"""
    kv_offloading_size: Annotated[float, Field(gt=0)] | None = None
    """GiB of host memory in which vLLM keeps KV blocks that leave the GPU. On a prefill or
    decode worker (nixl only), `up` puts the offloading connector behind the transfer's"""


class WorkerConfig(Block):
    """One vLLM server."""

    name: Label = Field(description=f"Unique name: {NAME_RULE}")
    role: WorkerRole = "general"
    """Requests that the worker is for. short, long: by routing.short_limit. general: any length.
    prefill, decode: one leg of a hand-over; a decode worker also serves requests without a
    hand-over"""
    url: Url | None = None
    """http://host:port or https://host:port. A worker with a launch block and no url gets a free
    port"""
    model: Name | None = None
    """Model name that clients use; the file's `model` if not given"""
    max_model_len: Count | None = None
    """Context length in tokens. The worker reports its own if not given; a value here can lower
    it, but not raise it"""
    max_requests: Count | None = None
    """Maximum number of requests in flight, over all router processes; no limit of its own if
    not given. On a long worker, the `adaptive` rule reserves a quarter of them, at least one,
    for long requests, until a minute or two after the last long request. With 1, short requests
    then use the worker only if no other worker is left for them"""
    api_key: Key | None = Field(None, repr=False)
    """API key that the router sends to this worker in place of the client's Authorization header"""
    tls: WorkerTlsConfig | None = None
    """TLS settings for an https:// URL; the file's worker_tls if not given"""
    journal: Annotated[tuple[JournalEndpoint, ...], LIST, BeforeValidator(_as_list)] = ()
    """Where the worker's engine publishes its journal: tcp://host:port or ipc:///path; a list
    with one address per rank for data parallelism. `vllm-sched up` starts a worker with its
    journal there; with `auto` on a free port"""
    launch: LaunchConfig | None = None
    """How `vllm-sched up` starts the worker on this machine"""
    profile: Name | None = None
    """Machine that `vllm-sched simulate` uses for this worker: the name of a built-in profile,
    or a file that `calibrate` wrote. A relative path is tried from the fleet file's folder first"""

    @property
    def address(self) -> tuple[str, int] | None:
        return None if self.url is None else address_of(self.url)

    @property
    def keys_to_choose(self) -> list[str]:
        """The keys with addresses that `up` has yet to choose."""
        return ["url"] * (self.url is None) + ["journal"] * (self.journal == (AUTO,))

    @property
    def stated_max_model_len(self) -> int | None:
        """The context length in the file: `max_model_len`, or the flag in `launch.args`."""
        return self.max_model_len or self.flag_max_model_len

    @property
    def flag_max_model_len(self) -> int | None:
        """The value of `--max-model-len` in `launch.args`, if it is a plain number."""
        return self._number_of("--max-model-len")

    @property
    def slots(self) -> int | None:
        """Number of slots: `--max-num-seqs` times the number of data-parallel engines."""
        slots = self._number_of("--max-num-seqs")
        return slots * self.engines if slots else None

    @property
    def engines(self) -> int:
        """Number of data-parallel engines by `launch.args`."""
        return self._number_of("--data-parallel-size", "-dp") or 1

    @property
    def sets_scheduler(self) -> bool:
        """Whether `up` chooses the worker's scheduler."""
        return self.launch is not None and bool(self.launch.policies or self.journal)

    def _number_of(self, *names: str) -> int | None:
        flags = " ".join(self.launch.args if self.launch else ()).replace("=", " ").split()
        values = [
            value
            for flag, value in itertools.pairwise(flags)
            if flag.replace("_", "-") in names and value.isascii() and value.isdigit()
        ]
        return int(values[-1]) if values else None


class PoolConfig(Block):
    """A pool of identical workers that the router discovers."""

    name: Label = Field(
        description="Unique name of the pool, for logs and for names of workers that are known "
        f"only by address: {NAME_RULE}"
    )
    selector: Name | None = None
    """Label selector for EndpointSlices, as in kubernetes.io/service-name=vllm-short. Give
    either selector or dns"""
    dns: DnsName | None = None
    """DNS name that resolves to the address of each worker, as the name of a headless Service
    does"""
    port: Annotated[
        Annotated[int, Field(ge=1, le=LAST_PORT)] | Name | None,
        says(f"must be a number from 1 to {LAST_PORT}, or the name of a port"),
    ] = None
    """Port of the workers: a number, or with selector the name of a port. If not given: the only
    port of the EndpointSlice with selector, 8000 otherwise. A port named journal is that of the
    workers' journals"""
    role: WorkerRole = "general"
    """Role of the workers: see `workers`"""
    model: Name | None = None
    """Model name that clients use; the file's `model` if not given"""
    max_model_len: Count | None = None
    """Context length in tokens. Each worker reports its own if not given; a value here can lower
    it, but not raise it"""
    max_requests: Count | None = None
    """Maximum number of requests in flight on each worker: see `workers`"""
    api_key: Key | None = Field(None, repr=False)
    """API key that the router sends to these workers in place of the client's Authorization
    header"""
    api_key_file: FilePath | None = None
    """File with that API key, read at the start and at each reload"""
    tls: WorkerTlsConfig | None = None
    """TLS settings for these workers; {} for the file's worker_tls. Plain HTTP if not given"""

    @property
    def scheme(self) -> str:
        return "http" if self.tls is None else "https"

    def worker(
        self, name: str, url: str | None, api_key: str | None = None, journal: tuple[str, ...] = ()
    ) -> WorkerConfig:
        alike = self.model_dump(include=set(WorkerConfig.model_fields) - {"name", "url"})
        own = {"name": name, "url": url, "api_key": api_key, "journal": journal}
        return WorkerConfig(**alike | own)


class KubernetesConfig(Block):
    """The Kubernetes API server. Inside a pod the defaults are right."""

    url: ApiUrl | None = None
    """https://host:port of the API server; the pod's own cluster if not given"""
    namespace: Name | None = None
    """Namespace of the workers; the pod's own if not given"""
    token_file: FilePath = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
    """File with the bearer token, read for each request. If the file does not exist, no token is
    sent"""
    ca_file: FilePath = Path("/var/run/secrets/kubernetes.io/serviceaccount/ca.crt")
    """CA certificates that sign the API server's certificate. If the file does not exist, the
    system's certificates are used"""
    watch_s: Annotated[float, Field(ge=1)] = 30.0
    """Duration of one watch request in seconds. A watch that does not end in time is considered
    dead and is opened again"""
    resync_s: Seconds = 300.0
    """Seconds after which the router lists all EndpointSlices again"""


class DiscoveryConfig(Block):
    """Workers that the router discovers."""

    pools: Annotated[tuple[PoolConfig, ...], LIST, AfterValidator(_require_pools)]
    """Pools of discovered workers"""
    kubernetes: KubernetesConfig = KubernetesConfig()
    dns_every_s: Seconds = 5.0
    """Seconds between two look-ups of a DNS name"""

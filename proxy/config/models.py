"""What a fleet file may say, and what holds where it says nothing.

Rules that one field can tell are here; those that take two are in `checks`.
"""

from __future__ import annotations

import itertools
import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

KIB, MIB = 1024, 1024 * 1024
HTTP_PORT = 80
HOST = re.compile(r"[\w.:-]+", re.ASCII)


class Block(BaseModel):
    """A mapping in the file: frozen, and strict about keys and types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _worker_url(url: str) -> str:
    """Check that it is `http://host[:port]` and nothing more; return it without a final slash."""
    parts = urlsplit(url)
    example = "write it as http://host:port"
    if parts.scheme != "http":
        # TLS belongs to whatever stands in front of the fleet, or to its network.
        raise ValueError(f"only http:// is spoken to workers; {example}")
    if parts.username is not None:
        raise ValueError("credentials in it would not be sent; give the key as api_key")
    if parts.path.strip("/") or parts.query or parts.fragment:
        rest = url.partition(parts.netloc)[2]
        raise ValueError(f"paths are those of the client's requests; leave out {rest!r}")
    if not HOST.fullmatch(parts.hostname or ""):
        raise ValueError(f"no host in it; {example}")
    try:
        port = parts.port
    except ValueError:
        raise ValueError(f"the port must be 1 to 65535; {example}") from None
    if port == 0:
        raise ValueError(f"nobody listens on port 0; {example}")
    return url.rstrip("/")


def _some(workers: tuple[WorkerConfig, ...]) -> tuple[WorkerConfig, ...]:
    # Not min_length: that counts only those without a mistake.
    if not workers:
        raise ValueError("at least one is needed")
    return workers


Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(min_length=1)]
# They stand in headers, in metrics' labels and in the names of log files.
WorkerName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Key = Annotated[str, Field(pattern=r"^[!-~]+$")]
Url = Annotated[str, AfterValidator(_worker_url)]
# A tuple is what a list of the file becomes; strictness is for what is in it.
LIST = Field(strict=False)


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
    role: Literal["short", "long", "general"] = Field("general", description="what it is for")
    url: Url | None = Field(None, description="http://host:port; with launch, a free port if none")
    model: Name | None = Field(None, description="what clients call its model, if not the fleet's")
    max_model_len: Count | None = Field(None, description="asked of the worker if not given")
    max_requests: Count | None = Field(None, description="in flight at once; no own limit if none")
    api_key: Key | None = Field(
        None, repr=False, description="sent to this worker in place of the client's Authorization"
    )
    launch: LaunchConfig | None = Field(None, description="how `vllm-sched up` starts it")

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port of its URL."""
        if self.url is None:
            return None
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or HTTP_PORT

    @property
    def stated_max_model_len(self) -> int | None:
        """The context length that the file tells, be it only among the flags."""
        return self.max_model_len or self.flag_max_model_len

    @property
    def flag_max_model_len(self) -> int | None:
        """The context length that it is launched with, where that is a plain number."""
        flags = " ".join(self.launch.args if self.launch else ()).replace("=", " ").split()
        values = [
            value
            for flag, value in itertools.pairwise(flags)
            if flag.replace("_", "-") == "--max-model-len" and value.isascii() and value.isdigit()
        ]
        return int(values[-1]) if values else None


class AdminConfig(Block):
    """Where the admin API listens."""

    host: Name = Field("127.0.0.1", description="whoever reaches it rules the fleet")
    port: Port = Field(8001, description="0 is any free one")


class QueueConfig(Block):
    """Requests that wait in the router for a worker with room."""

    max_requests: Annotated[int, Field(ge=0)] = Field(1024, description="0: nobody waits")
    max_bytes: Count = Field(256 * MIB, description="of their bodies together")
    max_wait_s: Seconds = Field(30.0, description="refused with 429 after that")


class TimeoutConfig(Block):
    """How long silence is borne."""

    connect_s: Seconds = Field(3.0, description="until a worker takes the connection")
    first_byte_s: Seconds = Field(600.0, description="until a worker begins its answer")
    idle_s: Seconds = Field(300.0, description="between two pieces of an answer")
    client_idle_s: Seconds = Field(75.0, description="between two requests of a connection")
    client_header_s: Seconds = Field(10.0, description="for a request's header to arrive")


class RetryConfig(Block):
    """Other workers, where one failed before the first byte."""

    attempts: Annotated[int, Field(ge=1, le=10)] = Field(
        3, description="per request, the first one included"
    )
    budget: Annotated[float, Field(ge=0, le=1)] = Field(
        0.2, description="retries per request over a window: a failing fleet is not hit harder"
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
    admin: AdminConfig = AdminConfig()
    max_body_bytes: Count = Field(64 * MIB, description="of one request")
    max_header_bytes: Annotated[int, Field(ge=KIB)] = Field(64 * KIB, description="of one request")
    drain_s: Annotated[float, Field(ge=0)] = Field(
        30.0, description="that requests have to finish when the router is told to stop"
    )
    queue: QueueConfig = QueueConfig()
    timeouts: TimeoutConfig = TimeoutConfig()
    retries: RetryConfig = RetryConfig()
    probe: ProbeConfig = ProbeConfig()


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


class FleetConfig(Block):
    """A whole fleet file."""

    model: Name = Field(description="the name clients use; workers may name their own")
    workers: Annotated[tuple[WorkerConfig, ...], LIST, AfterValidator(_some)] = Field(
        description="the vLLM servers"
    )
    router: RouterConfig = RouterConfig()
    routing: RoutingConfig = RoutingConfig()

    def model_of(self, worker: WorkerConfig) -> str:
        """Return the name that clients use for what this worker serves."""
        return worker.model or self.model

"""Custom resources as their definitions have them, as far as ours go: no package has their schemas.

Written from the types of KEDA 2.17 (`keda.sh/v1alpha1`), of the Prometheus operator 0.82
(`monitoring.coreos.com/v1`) and of LeaderWorkerSet 0.6 (`leaderworkerset.x-k8s.io/v1`). A field
that is not here is refused, for whoever uses it first to look up. What of Kubernetes' own is within
(pods, an autoscaler's behaviour) is judged by its own schemas.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from tests.deploy.rendered import Json

Count = Annotated[int, Field(ge=0, lt=1 << 31)]
Words = dict[str, str]
Number = Annotated[str, Field(pattern=r"^\d+(\.\d+)?$")]  # KEDA takes strings alone
Duration = Annotated[str, Field(pattern=r"^((\d+)d)?((\d+)h)?((\d+)m)?((\d+)s)?((\d+)ms)?$")]


class Fields(BaseModel):
    """Nothing but what is named, and no number in the place of a text."""

    model_config = ConfigDict(extra="forbid", strict=True, alias_generator=to_camel)


class Metadata(Fields):
    """Of any object."""

    name: str | None = None
    namespace: str | None = None
    labels: Words = {}
    annotations: Words = {}


class Selector(Fields):
    """Of pods."""

    match_labels: Words


# KEDA


class Target(Fields):
    """Who is scaled."""

    api_version: str
    kind: str
    name: str


class Asked(Fields):
    """What KEDA's trigger of type `prometheus` is told."""

    server_address: Annotated[str, Field(pattern="^https?://")]
    query: str
    threshold: Number
    ignore_null_values: Literal["true", "false"]


class Trigger(Fields):
    """By what it is scaled."""

    type: Literal["prometheus"]
    metadata: Asked


class Fallback(Fields):
    """How many there are while nobody answers."""

    failure_threshold: Count
    replicas: Count
    behavior: Literal[
        "static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"
    ]


class Autoscaler(Fields):
    """What the autoscaler that KEDA makes is given."""

    behavior: Json


class Advanced(Fields):
    """More for that."""

    horizontal_pod_autoscaler_config: Autoscaler


class Scaled(Fields):
    """How one is scaled."""

    scale_target_ref: Target
    min_replica_count: Count
    max_replica_count: Count
    polling_interval: Count
    advanced: Advanced
    fallback: Fallback
    triggers: Annotated[list[Trigger], Field(min_length=1)]


class ScaledObject(Fields):
    """KEDA's."""

    api_version: Literal["keda.sh/v1alpha1"]
    kind: Literal["ScaledObject"]
    metadata: Metadata
    spec: Scaled


# The Prometheus operator


class Endpoint(Fields):
    """A port that is scraped."""

    port: str
    path: str
    interval: Duration


class Monitored(Fields):
    """Which pods are."""

    selector: Selector
    pod_target_labels: list[str] = []
    pod_metrics_endpoints: list[Endpoint]


class PodMonitor(Fields):
    """Whom Prometheus scrapes."""

    api_version: Literal["monitoring.coreos.com/v1"]
    kind: Literal["PodMonitor"]
    metadata: Metadata
    spec: Monitored


class Rule(Fields):
    """An alert, or what is recorded."""

    record: str | None = None
    alert: str | None = None
    expr: str
    for_: Duration | None = Field(None, alias="for")
    labels: Words = {}
    annotations: Words = {}

    @model_validator(mode="after")
    def is_one_of_both(self) -> Rule:
        """Refuse what the operator would."""
        if (self.record is None) == (self.alert is None):
            raise ValueError("give record or alert")
        if self.alert is None and (self.for_ is not None or self.annotations):
            raise ValueError("`for` and annotations are an alert's")
        return self


class Group(Fields):
    """Rules that are evaluated together."""

    name: Annotated[str, Field(min_length=1)]
    rules: list[Rule]


class Groups(Fields):
    """All of them."""

    groups: list[Group]


class PrometheusRule(Fields):
    """What Prometheus evaluates."""

    api_version: Literal["monitoring.coreos.com/v1"]
    kind: Literal["PrometheusRule"]
    metadata: Metadata
    spec: Groups


# LeaderWorkerSet


class Template(Fields):
    """A pod's."""

    metadata: Metadata
    spec: Json


class Pods(Fields):
    """One group."""

    size: Annotated[int, Field(ge=1)]
    restart_policy: Literal["RecreateGroupOnPodRestart", "None", "Default"]
    leader_template: Template
    worker_template: Template


class Sets(Fields):
    """Groups."""

    replicas: Count
    leader_worker_template: Pods


class LeaderWorkerSet(Fields):
    """Groups of pods, each one worker to us."""

    api_version: Literal["leaderworkerset.x-k8s.io/v1"]
    kind: Literal["LeaderWorkerSet"]
    metadata: Metadata
    spec: Sets


KINDS: dict[str, type[Fields]] = {
    each.__name__: each for each in (ScaledObject, PodMonitor, PrometheusRule, LeaderWorkerSet)
}


def within(each: Json) -> Iterator[Json]:
    """Check a custom resource; yield the objects of Kubernetes' own that it comes to."""
    found: Any = KINDS[each["kind"]].model_validate(each)
    if isinstance(found, LeaderWorkerSet):
        templates = found.spec.leader_worker_template
        for template in (templates.leader_template, templates.worker_template):
            yield {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "a", "labels": template.metadata.labels},
                "spec": template.spec,
            }
    elif isinstance(found, ScaledObject):
        yield {
            "apiVersion": "autoscaling/v2",
            "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": "a"},
            "spec": {
                "scaleTargetRef": found.spec.scale_target_ref.model_dump(by_alias=True),
                "minReplicas": found.spec.min_replica_count,
                "maxReplicas": found.spec.max_replica_count,
                "behavior": found.spec.advanced.horizontal_pod_autoscaler_config.behavior,
            },
        }

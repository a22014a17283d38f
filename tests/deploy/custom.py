"""Schemas of the custom resources, as far as the manifests use them.

Written from the types of KEDA 2.17 (`keda.sh/v1alpha1`), of the Prometheus operator 0.82
(`monitoring.coreos.com/v1`) and of LeaderWorkerSet 0.6 (`leaderworkerset.x-k8s.io/v1`). A field
that is missing here is refused. Kubernetes' own objects within (pods, an autoscaler) are
validated by its own schemas.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from tests.deploy.rendered import Json

Count = Annotated[int, Field(ge=0, lt=1 << 31)]
Words = dict[str, str]
Number = Annotated[str, Field(pattern=r"^\d+(\.\d+)?$")]  # KEDA accepts strings only
Duration = Annotated[str, Field(pattern=r"^((\d+)d)?((\d+)h)?((\d+)m)?((\d+)s)?((\d+)ms)?$")]


class Fields(BaseModel):
    """A model that refuses unknown fields and converts no types."""

    model_config = ConfigDict(extra="forbid", strict=True, alias_generator=to_camel)


class Metadata(Fields):
    """Metadata of an object."""

    name: str | None = None
    namespace: str | None = None
    labels: Words = {}
    annotations: Words = {}


class Selector(Fields):
    """A label selector."""

    match_labels: Words


# KEDA


class Target(Fields):
    """The scaled object."""

    api_version: str
    kind: str
    name: str


class PrometheusQuery(Fields):
    """The metadata of KEDA's `prometheus` trigger."""

    server_address: Annotated[str, Field(pattern="^https?://")]
    query: str
    threshold: Number
    ignore_null_values: Literal["true", "false"]


class Trigger(Fields):
    """A trigger of KEDA."""

    type: Literal["prometheus"]
    metadata: PrometheusQuery


class Fallback(Fields):
    """The replicas while Prometheus does not answer."""

    failure_threshold: Count
    replicas: Count
    behavior: Literal[
        "static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"
    ]


class Autoscaler(Fields):
    """The settings of the autoscaler that KEDA creates."""

    behavior: Json


class Advanced(Fields):
    """Advanced settings of KEDA."""

    horizontal_pod_autoscaler_config: Autoscaler


class Scaled(Fields):
    """The spec of a ScaledObject."""

    scale_target_ref: Target
    min_replica_count: Count
    max_replica_count: Count
    polling_interval: Count
    advanced: Advanced
    fallback: Fallback
    triggers: Annotated[list[Trigger], Field(min_length=1)]


class ScaledObject(Fields):
    """KEDA's ScaledObject."""

    api_version: Literal["keda.sh/v1alpha1"]
    kind: Literal["ScaledObject"]
    metadata: Metadata
    spec: Scaled


# The Prometheus operator


class Endpoint(Fields):
    """A scraped port."""

    port: str
    path: str
    interval: Duration


class Monitored(Fields):
    """The spec of a PodMonitor."""

    selector: Selector
    pod_target_labels: list[str] = []
    pod_metrics_endpoints: list[Endpoint]


class PodMonitor(Fields):
    """The operator's PodMonitor."""

    api_version: Literal["monitoring.coreos.com/v1"]
    kind: Literal["PodMonitor"]
    metadata: Metadata
    spec: Monitored


class Rule(Fields):
    """An alert or a recording rule."""

    record: str | None = None
    alert: str | None = None
    expr: str
    for_: Duration | None = Field(None, alias="for")
    labels: Words = {}
    annotations: Words = {}

    @model_validator(mode="after")
    def is_one_of_both(self) -> Rule:
        """Refuse the rules that the operator refuses."""
        if (self.record is None) == (self.alert is None):
            raise ValueError("give record or alert")
        if self.alert is None and (self.for_ is not None or self.annotations):
            raise ValueError("`for` and annotations are an alert's")
        return self


class Group(Fields):
    """A group of rules."""

    name: Annotated[str, Field(min_length=1)]
    rules: list[Rule]


class Groups(Fields):
    """The spec of a PrometheusRule."""

    groups: list[Group]


class PrometheusRule(Fields):
    """The operator's PrometheusRule."""

    api_version: Literal["monitoring.coreos.com/v1"]
    kind: Literal["PrometheusRule"]
    metadata: Metadata
    spec: Groups


# LeaderWorkerSet


class Template(Fields):
    """A pod template."""

    metadata: Metadata
    spec: Json


class Pods(Fields):
    """The template of one group."""

    size: Annotated[int, Field(ge=1)]
    restart_policy: Literal["RecreateGroupOnPodRestart", "None", "Default"]
    leader_template: Template
    worker_template: Template


class Sets(Fields):
    """The spec of a LeaderWorkerSet."""

    replicas: Count
    leader_worker_template: Pods


class LeaderWorkerSet(Fields):
    """A LeaderWorkerSet: each group of pods is one worker."""

    api_version: Literal["leaderworkerset.x-k8s.io/v1"]
    kind: Literal["LeaderWorkerSet"]
    metadata: Metadata
    spec: Sets


KINDS: dict[str, type[Fields]] = {
    kind.__name__: kind for kind in (ScaledObject, PodMonitor, PrometheusRule, LeaderWorkerSet)
}


def contained_objects(resource: Json) -> Iterator[Json]:
    """Validate a custom resource; yield the Kubernetes objects that it contains."""
    found: Any = KINDS[resource["kind"]].model_validate(resource)
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

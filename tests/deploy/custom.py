"""Schemas of the custom resources, as far as the manifests use them.

Written from the types of KEDA 2.17 (`keda.sh/v1alpha1`), of the Prometheus operator 0.82
(`monitoring.coreos.com/v1`) and of LeaderWorkerSet 0.6 (`leaderworkerset.x-k8s.io/v1`). A field
that is missing here is refused. Kubernetes' own objects within (pods, an autoscaler) are
validated by its own schemas.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jsonschema import Draft202012Validator

from tests.deploy.rendered import Json

TEXT: Json = {"type": "string"}
NAME: Json = {"type": "string", "minLength": 1}
COUNT: Json = {"type": "integer", "minimum": 0, "maximum": (1 << 31) - 1}
LABELS: Json = {"type": "object", "additionalProperties": TEXT}
KUBERNETES_OWN: Json = {"type": "object"}


def pattern(text: str) -> Json:
    return {"type": "string", "pattern": text}


def one_of(*values: str) -> Json:
    return {"enum": [*values]}


def each(item: Json, *, at_least: int = 0) -> Json:
    return {"type": "array", "items": item, "minItems": at_least}


def fields(required: Json, **optional: Json) -> Json:
    """Return the schema of an object with these fields only."""
    return {
        "type": "object", "properties": required | optional, "required": [*required],
        "additionalProperties": False,
    }  # fmt: skip


NUMBER = pattern(r"^\d+(\.\d+)?$")  # KEDA accepts strings only
DURATION = pattern(r"^((\d+)d)?((\d+)h)?((\d+)m)?((\d+)s)?((\d+)ms)?$")
METADATA = fields({}, name=TEXT, namespace=TEXT, labels=LABELS, annotations=LABELS)

QUERY = {
    "serverAddress": pattern("^https?://"),
    "query": TEXT,
    "threshold": NUMBER,
    "ignoreNullValues": one_of("true", "false"),
}
FALLBACKS = ("static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower")
SCALED = {
    "scaleTargetRef": fields({"apiVersion": TEXT, "kind": TEXT, "name": TEXT}),
    "minReplicaCount": COUNT,
    "maxReplicaCount": COUNT,
    "pollingInterval": COUNT,
    "advanced": fields({"horizontalPodAutoscalerConfig": fields({"behavior": KUBERNETES_OWN})}),
    "fallback": fields(
        {"failureThreshold": COUNT, "replicas": COUNT, "behavior": one_of(*FALLBACKS)}
    ),
    "triggers": each(fields({"type": one_of("prometheus"), "metadata": fields(QUERY)}), at_least=1),
}
ENDPOINT = fields({"port": TEXT, "path": TEXT, "interval": DURATION})
MONITORED = fields(
    {"selector": fields({"matchLabels": LABELS}), "podMetricsEndpoints": each(ENDPOINT)},
    podTargetLabels=each(TEXT),
)
# The operator refuses `for` and annotations of a recording rule.
ALERT = fields(
    {"alert": TEXT, "expr": TEXT}, labels=LABELS, annotations=LABELS, **{"for": DURATION}
)
RECORD = fields({"record": TEXT, "expr": TEXT}, labels=LABELS)
GROUP = fields({"name": NAME, "rules": each({"oneOf": [ALERT, RECORD]})})
TEMPLATE = fields({"metadata": METADATA, "spec": KUBERNETES_OWN})
PODS = {
    "size": {"type": "integer", "minimum": 1},
    "restartPolicy": one_of("RecreateGroupOnPodRestart", "None", "Default"),
    "leaderTemplate": TEMPLATE,
    "workerTemplate": TEMPLATE,
}
SPECS = {
    ("ScaledObject", "keda.sh/v1alpha1"): fields(SCALED),
    ("PodMonitor", "monitoring.coreos.com/v1"): MONITORED,
    ("PrometheusRule", "monitoring.coreos.com/v1"): fields({"groups": each(GROUP)}),
    ("LeaderWorkerSet", "leaderworkerset.x-k8s.io/v1"): fields(
        {"replicas": COUNT, "leaderWorkerTemplate": fields(PODS)}
    ),
}
KINDS = {
    kind: Draft202012Validator(
        fields(
            {"kind": one_of(kind), "apiVersion": one_of(api), "metadata": METADATA, "spec": spec}
        )
    )
    for (kind, api), spec in SPECS.items()
}


def contained_objects(resource: Json) -> Iterator[Json]:
    """Validate a custom resource; yield the Kubernetes objects that it contains."""
    KINDS[resource["kind"]].validate(resource)
    spec: Any = resource["spec"]
    if resource["kind"] == "LeaderWorkerSet":
        for name in ("leaderTemplate", "workerTemplate"):
            template = spec["leaderWorkerTemplate"][name]
            metadata = {"name": "a", "labels": template["metadata"].get("labels", {})}
            yield {
                "apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"],
            }  # fmt: skip
    elif resource["kind"] == "ScaledObject":
        yield {
            "apiVersion": "autoscaling/v2",
            "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": "a"},
            "spec": {
                "scaleTargetRef": spec["scaleTargetRef"],
                "minReplicas": spec["minReplicaCount"],
                "maxReplicas": spec["maxReplicaCount"],
                "behavior": spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"],
            },
        }

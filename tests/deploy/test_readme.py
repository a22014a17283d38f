"""deploy/README.md matches the files of deploy/."""

from __future__ import annotations

import re
import textwrap

import yaml

from proxy.config import parse
from tests.deploy.rendered import COMPONENTS, KUBERNETES, OVERLAYS, ROOT

TEXT = (ROOT / "deploy" / "README.md").read_text()


def test_named_paths_exist() -> None:
    """`tests/docs` checks the paths from the root of the repository."""
    folders = "fleets|systemd|compose|docker|kubernetes|overlays"
    for path in re.findall(rf"`((?:{folders})/[^`]*)`", TEXT):
        base = "deploy/kubernetes" if path.startswith("overlays") else "deploy"
        assert list(ROOT.glob(f"{base}/{path}")), path


def test_every_overlay_and_component_is_documented() -> None:
    for name in (*OVERLAYS, *COMPONENTS):
        assert f"`{name}`" in TEXT


def test_namespace_is_created_first() -> None:
    first = "kubectl apply -f deploy/kubernetes/base/router/namespace.yaml"
    # The overlay also has the namespace, but needs the Secrets first.
    keys = (KUBERNETES / "components" / "keys" / "kustomization.yaml").read_text()
    for text in (TEXT[TEXT.index("\n## Kubernetes") :], keys):
        assert -1 < text.find(first) < text.index("kubectl -n vllm-sched create")
    made = yaml.safe_load((ROOT / first.rsplit(" ", 1)[1]).read_text())
    assert (made["kind"], made["metadata"]["name"]) == ("Namespace", "vllm-sched")


def test_fleet_file_of_the_readme_is_valid() -> None:
    (snippet,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    config = parse("model: m\n" + textwrap.dedent(snippet), "README.md")
    assert config.discovery is not None
    assert [pool.role for pool in config.discovery.pools] == ["short", "long"]

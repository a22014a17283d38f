"""What deploy/README.md says is there."""

from __future__ import annotations

import re
import textwrap

from proxy.config import parse
from tests.deploy.rendered import COMPONENTS, OVERLAYS, ROOT

TEXT = (ROOT / "deploy" / "README.md").read_text()


def test_every_path_exists() -> None:
    named = set(re.findall(r"deploy/[\w./@*-]*[\w*]", TEXT)) - {"deploy/README.md"}
    assert len(named) >= 6
    for path in named:
        assert list(ROOT.glob(path)), path
    for path in re.findall(
        r"`((?:fleets|systemd|compose|docker|kubernetes|overlays)/[^`]*)`", TEXT
    ):
        base = "deploy/kubernetes" if path.startswith("overlays") else "deploy"
        assert list(ROOT.glob(f"{base}/{path}")), path


def test_every_overlay_and_component_is_told_of() -> None:
    for name in (*OVERLAYS, *COMPONENTS):
        assert f"`{name}`" in TEXT


def test_its_fleet_file_is_one() -> None:
    (snippet,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    config = parse("model: m\n" + textwrap.dedent(snippet), "README.md")
    assert config.discovery is not None
    assert [pool.role for pool in config.discovery.pools] == ["short", "long"]

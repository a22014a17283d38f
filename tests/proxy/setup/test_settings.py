"""Settings of the core and the data path, from the fleet file."""

from __future__ import annotations

from proxy.config.tenants import AdmissionConfig
from proxy.core.model.settings import RouterSettings
from proxy.core.tenants.tenants import Rank
from proxy.setup.settings import admission_settings, router_settings, tenant_spec, wire_settings
from proxy.wire.settings import WireSettings
from tests.present import present
from tests.proxy.config.fleet_files import read


def test_targets_of_classes() -> None:
    assert admission_settings(AdmissionConfig()) is None
    one = present(admission_settings(AdmissionConfig(ttft_s=5.0, interactive_ttft_s=2.0)))
    assert one.ttft_s == {Rank.INTERACTIVE: 2.0, Rank.STANDARD: 5.0, Rank.BATCH: 5.0}
    alone = present(admission_settings(AdmissionConfig(standard_ttft_s=3.0)))
    assert alone.ttft_s == {Rank.STANDARD: 3.0}
    paced = present(admission_settings(AdmissionConfig(tpot_s=0.1, batch_tpot_s=0.5)))
    assert paced.tpot_s == {Rank.INTERACTIVE: 0.1, Rank.STANDARD: 0.1, Rank.BATCH: 0.5}
    assert paced.ttft_s == {}


def test_settings_of_a_fleet_file_without_options_are_the_defaults() -> None:
    config = read()
    assert router_settings(config) == RouterSettings()
    assert wire_settings(config) == WireSettings(refuses_pages=True)


def test_settings_reach_the_router() -> None:
    tenant = {"name": "a", "key_hashes": [f"sha256:{'0' * 64}"], "ttft_s": 2.0, "tpot_s": 0.1}
    router = {
        "pass_targets": True,
        "client_deadlines": False,
        "client_fields": ["priority"],
        "pass_priority": True,
        "fairness": {"output_weight": 4.0},
        "admission": {"ttft_s": 1.0},
        "queue": {"max_tokens": 1000},
        "max_collected_bytes": 100 << 20,
        "drain_notice_s": 7.0,
        "timeouts": {"idle_s": 8.0},
    }
    config = read(tenants=[tenant], router=router, routing={"panic_threshold": 0.25})
    settings = router_settings(config)
    assert (settings.client_priority, settings.client_arguments) == (True, False)
    assert settings.pass_priority
    assert settings.fairness.output_weight == 4.0
    assert settings.admission is not None
    assert settings.queue_tokens == 1000
    assert settings.panic_threshold == 0.25
    wire = wire_settings(config)
    assert wire.max_collected_bytes == 100 << 20
    assert (wire.drain_notice_s, wire.idle_s) == (7.0, 8.0)
    assert (wire.pass_targets, wire.client_deadlines) == (True, False)
    found = tenant_spec(config.tenants[0], config)
    assert (found.ttft_s, found.tpot_s) == (2.0, 0.1)

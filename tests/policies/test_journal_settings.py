"""Settings of the journal: endpoints of ranks, keys, and errors in one line."""

from __future__ import annotations

import pytest

from vllm_sched.errors import UsageError
from vllm_sched.policies import registry
from vllm_sched.policies.journal_settings import JournalSettings
from vllm_sched.workers.launch import Side

PLACES = "tcp://HOST:PORT or ipc:///PATH"
FORMAT = f"an endpoint is {PLACES}"


@pytest.mark.parametrize(
    ("endpoint", "third", "local"),
    [
        ("tcp://127.0.0.1:5700", "tcp://127.0.0.1:5702", True),
        ("tcp://[::1]:5700", "tcp://[::1]:5702", True),
        ("tcp://*:5700", "tcp://*:5702", False),
        ("tcp://10.0.0.7:5700", "tcp://10.0.0.7:5702", False),
        ("ipc:///run/engine", "ipc:///run/engine_dp2", True),
    ],
)
def test_endpoint_of_a_rank(endpoint: str, third: str, local: bool) -> None:
    settings = JournalSettings(endpoint=endpoint)
    assert [settings.endpoint_of(rank) for rank in (0, 2)] == [endpoint, third]
    assert settings.is_local is local


@pytest.mark.parametrize(
    "endpoint",
    ["5700", "tcp://:5700", "tcp://host", "tcp://host:0", "tcp://host:65536", "ipc://name", None],
)
def test_wrong_or_missing_endpoint(endpoint: str | None) -> None:
    with pytest.raises(UsageError) as refused:
        registry.settings_of("journal", {} if endpoint is None else {"endpoint": endpoint})
    wrong = "missing" if endpoint is None else f"{endpoint!r}: {FORMAT}"
    assert str(refused.value) == (
        f"journal.endpoint is {wrong} (address on which the engine listens, {PLACES}); give one"
    )


def test_a_rank_beyond_the_last_port() -> None:
    with pytest.raises(UsageError, match="rank 2 would listen on port 65536; choose a lower port"):
        JournalSettings(endpoint="tcp://127.0.0.1:65534").endpoint_of(2)


def test_the_journal_is_set_like_a_policy_but_is_none() -> None:
    endpoint = "journal.endpoint=ipc:///x"
    config = registry.parse_settings(["lanes"], [endpoint])
    assert config == {"lanes": {}, "journal": {"endpoint": "ipc:///x"}}
    with pytest.raises(UsageError, match="unknown policy 'journal'"):
        registry.parse_settings(["journal"], [])
    assert Side.from_policies(config).name == "lanes"
    assert Side.from_policies({"journal": {"endpoint": "ipc:///x"}}).name == "none"

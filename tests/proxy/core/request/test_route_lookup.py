"""The paths that the router serves."""

from __future__ import annotations

import pytest

from proxy.core.model.route_table import PromptFields
from proxy.core.model.types import Reason
from proxy.core.request.route_lookup import find
from tests.proxy.core.making import refused, route


@pytest.mark.parametrize(
    "path",
    [
        *(f"/v1/{name}" for name in ("completions", "embeddings", "responses", "rerank", "score")),
        *("/v1/chat/completions", "/v1/chat/completions/batch", "/inference/v1/generate"),
        *("/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize"),
        *("/v1/audio/transcriptions", "/v1/audio/translations", "/pooling", "/classify"),
        *("/rerank", "/v2/rerank", "/v2/embed", "/score"),
    ],
)
def test_client_paths_of_vllm_are_served(path: str) -> None:
    assert route(path).method == "POST"


@pytest.mark.parametrize(
    "path",
    [
        *("/pause", "/sleep", "/wake_up", "/collective_rpc", "/reset_prefix_cache"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/update_weights"),
        *("/v1/realtime", "/invocations", "/", "/v1"),
        "/v1/chat/completions/",
        "/v1/responses/",
        "/v1/responses/a/b",
        "/v1/responses/a/cancel/b",
        "/v1/responses/a/",
        "/v1/responses/..",
        "/v1/responses/../cancel",
        "/v1/responses/%2e%2e/cancel",
        "/v1/responses/.x",
        "/v1/responses/a%2f..%2f..%2fsleep/cancel",
        "/v1/responses/a;b",
        "/v1/responses/a\n",
    ],
)
def test_other_paths_are_404(path: str) -> None:
    refusal = refused(find("POST", path))
    assert (refusal.status, refusal.reason) == (404, Reason.UNKNOWN_PATH)
    assert path.strip() in refusal.message


def test_stored_response_paths_have_the_response_id() -> None:
    get = route("/v1/responses/resp_1", "GET")
    cancel = route("/v1/responses/resp_1/cancel")
    assert (get.response_id, get.name) == ("resp_1", "responses/id")
    assert (cancel.response_id, cancel.name) == ("resp_1", "responses/cancel")
    assert get.shape is PromptFields.EMPTY
    moved = "resp____prefill_addr_10.0.0.1:21001___decode_addr_10.0.0.2:22001_1a-2"
    assert route(f"/v1/responses/{moved}", "GET").response_id == moved
    assert route("/v1/responses/render").response_id == ""


def test_long_path_is_shortened_in_the_refusal() -> None:
    assert len(refused(find("POST", "/" + "x" * 10_000)).message) < 300


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/responses/", "/v1/responses"),
    ],
)
def test_refusal_names_the_path_that_a_wrong_base_url_hides(path: str, meant: str) -> None:
    assert f"{meant} exists: check the client's base URL" in refused(find("POST", path)).message

"""The paths that the router serves."""

from __future__ import annotations

import pytest

from proxy.core.model.route_table import ROUTES, PromptFields, Route
from proxy.core.model.types import Reason
from proxy.core.request.routes import find
from tests.proxy.core.making import refused, route


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/rerank",
        "/v1/score",
        "/rerank",
        "/v2/rerank",
        "/v2/embed",
        "/score",
        "/pooling",
        "/classify",
        "/tokenize",
        "/detokenize",
        "/inference/v1/generate",
    ],
)
def test_client_paths_of_vllm_are_served(path: str) -> None:
    assert route(path).method == "POST"


@pytest.mark.parametrize(
    "path",
    [
        "/pause",
        "/sleep",
        "/wake_up",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/v1/realtime",
        "/update_weights",
        "/invocations",
        "/",
        "/v1",
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


def test_wrong_method_is_405() -> None:
    refusal = refused(find("GET", "/v1/chat/completions"))
    assert (refusal.status, refusal.param) == (405, None)
    assert refusal.headers == (("Allow", "POST"),)
    assert refused(find("DELETE", "/v1/responses/r1")).status == 405


def test_stored_response_paths_have_the_response_id() -> None:
    get = route("/v1/responses/resp_1", "GET")
    cancel = route("/v1/responses/resp_1/cancel")
    assert (get.response_id, get.name) == ("resp_1", "responses/id")
    assert (cancel.response_id, cancel.name) == ("resp_1", "responses/cancel")
    assert get.shape is PromptFields.EMPTY
    moved = "resp____prefill_addr_10.0.0.1:21001___decode_addr_10.0.0.2:22001_1a-2"
    assert route(f"/v1/responses/{moved}", "GET").response_id == moved


def test_render_is_no_stored_response() -> None:
    assert route("/v1/responses/render").response_id == ""


def test_route_names_are_no_paths() -> None:
    names = {served.name for served in ROUTES.values()}
    assert "chat/completions" in names
    assert not any(name.startswith("/") for name in names)


def test_long_path_is_shortened_in_the_refusal() -> None:
    assert len(refused(find("POST", "/" + "x" * 10_000)).message) < 300


def test_generates_is_set_per_route() -> None:
    assert isinstance(find("POST", "/v1/completions"), Route)
    assert route("/v1/completions").generates
    assert not route("/v1/embeddings").generates

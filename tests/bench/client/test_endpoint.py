from __future__ import annotations

import json
import ssl
from dataclasses import replace
from pathlib import Path

import pytest
import trustme

from tests.bench.fake_openai import TEMPLATE_TOKENS, TOKENS_PER_WORD, FakeOpenAI, serving, tokens
from vllm_sched.bench.client.endpoint import (
    CHAT,
    COMPLETIONS,
    NO_COUNT,
    NO_IGNORE_EOS,
    SAME_COUNT,
    EndpointError,
    EndpointOptions,
    probe_endpoint,
)
from vllm_sched.bench.client.text import Measure, Texts
from vllm_sched.bench.traffic.types import Request


@pytest.mark.parametrize("tokenizer", [True, False])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_prompts_have_the_requested_tokens(path: str, *, tokenizer: bool) -> None:
    async with serving(FakeOpenAI(tokenizer=tokenizer)) as fake:
        endpoint = await probe_endpoint(EndpointOptions(fake.url, path=path))
    template = TEMPLATE_TOKENS if path == CHAT else 0
    assert endpoint.measure == Measure(TOKENS_PER_WORD, template)
    assert (endpoint.model, endpoint.max_model_len) == ("fake", 4096)
    body = json.loads(endpoint.request_body(Texts(0), 0, Request(0, "a", 1005, 7, "t")))
    assert tokens(body) == pytest.approx(1005, abs=1)
    assert body["user"] == "t"
    assert body["max_completion_tokens" if path == CHAT else "max_tokens"] == 7
    assert (body["ignore_eos"], body["stream"], body["temperature"]) == (True, True, 0)
    assert body["stream_options"] == {"include_usage": True}
    named = replace(endpoint, model='a "b"', ignore_eos=False).body("c", 1, 'd"')
    assert (json.loads(named)["model"], json.loads(named)["user"]) == ('a "b"', 'd"')


async def test_ignore_eos_is_omitted_for_an_endpoint_that_rejects_it() -> None:
    async with serving(FakeOpenAI(knows_ignore_eos=False)) as fake:
        endpoint = await probe_endpoint(EndpointOptions(fake.url))
        wanted = await probe_endpoint(EndpointOptions(fake.url, ignore_eos=False))
    assert not endpoint.ignore_eos
    assert b"ignore_eos" not in endpoint.body("a", 3)
    assert endpoint.doubts == (NO_IGNORE_EOS,)
    assert wanted.doubts == ()


async def test_endpoint_without_token_counts_is_reported() -> None:
    async with serving(FakeOpenAI(tokenizer=False, tells_usage=False)) as fake:
        endpoint = await probe_endpoint(EndpointOptions(fake.url))
    assert endpoint.measure == Measure()  # one token per word is assumed
    assert endpoint.doubts == (NO_COUNT,)
    async with serving(FakeOpenAI(tells_usage=False)) as fake:
        assert (await probe_endpoint(EndpointOptions(fake.url))).doubts == ()


@pytest.mark.parametrize("tokenizer", [True, False])
async def test_endpoint_with_constant_token_counts_is_reported(*, tokenizer: bool) -> None:
    async with serving(FakeOpenAI(tokenizer=tokenizer, counts=10)) as fake:
        endpoint = await probe_endpoint(EndpointOptions(fake.url))
    assert endpoint.measure == Measure()
    assert endpoint.doubts == (SAME_COUNT,)


async def test_api_key_is_sent_with_every_request_and_not_shown() -> None:
    async with serving(FakeOpenAI(key="secret")) as fake:
        endpoint = await probe_endpoint(EndpointOptions(fake.url, key="secret", explain=True))
        with pytest.raises(EndpointError, match=r"HTTP 401: .*bad key.*rejects this key"):
            await probe_endpoint(EndpointOptions(fake.url, key="wrong"))
        with pytest.raises(EndpointError, match=r"/v1/models: HTTP 401: .*--api-key, or in OPENAI"):
            await probe_endpoint(EndpointOptions(fake.url))
    assert fake.headers
    assert all(h["Authorization"] == "Bearer secret" for h in fake.headers)
    assert all(h["X-Explain"] == "1" for h in fake.headers)
    assert "secret" not in repr(endpoint) + repr(EndpointOptions(fake.url, key="secret"))


async def test_model_option_selects_the_model() -> None:
    async with serving(FakeOpenAI()) as fake:
        assert (await probe_endpoint(EndpointOptions(fake.url, "other"))).model == "other"
        with pytest.raises(EndpointError, match=r"--model third: .*choose from fake, other"):
            await probe_endpoint(EndpointOptions(fake.url, "third"))
    for status in (404, 405, 501):
        async with serving(FakeOpenAI(lists_models=False, without_list=status)) as fake:
            assert (await probe_endpoint(EndpointOptions(fake.url, "any"))).model == "any"
            with pytest.raises(EndpointError, match=f"HTTP {status}"):
                await probe_endpoint(EndpointOptions(fake.url))
    async with serving(FakeOpenAI(lists_models=False, without_list=500)) as fake:
        with pytest.raises(EndpointError, match="HTTP 500"):
            await probe_endpoint(EndpointOptions(fake.url, "any"))


async def test_missing_and_other_services_are_reported_in_one_line() -> None:
    with pytest.raises(EndpointError, match=r"^http://127\.0\.0\.1:9: .*refused") as caught:
        await probe_endpoint(EndpointOptions("http://127.0.0.1:9"))
    assert "\n" not in str(caught.value)
    assert str(caught.value).count("127.0.0.1:9:") == 1
    fake = FakeOpenAI()
    async with serving(fake):
        with pytest.raises(
            EndpointError, match=r"/elsewhere: /v1/models: HTTP 404: .*an OpenAI end"
        ):
            await probe_endpoint(EndpointOptions(fake.url + "/elsewhere"))
    async with serving(FakeOpenAI(streams=False)) as fake:
        with pytest.raises(EndpointError, match="/v1/completions does not stream"):
            await probe_endpoint(EndpointOptions(fake.url))


@pytest.mark.parametrize(("missing", "served"), [(COMPLETIONS, CHAT), (CHAT, COMPLETIONS)])
async def test_missing_api_is_reported_with_the_other_one(missing: str, served: str) -> None:
    async with serving(FakeOpenAI(paths=(served,))) as fake:
        with pytest.raises(
            EndpointError, match=rf"{missing}: HTTP 404: .*use --endpoint {served}$"
        ):
            await probe_endpoint(EndpointOptions(fake.url, path=missing))
        assert (await probe_endpoint(EndpointOptions(fake.url, path=served))).path == served


async def test_untrusted_certificate_is_reported_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, known = trustme.CA(), tmp_path / "ca.pem"
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    authority.cert_pem.write_to_path(str(known))
    async with serving(FakeOpenAI(), tls) as fake:
        assert fake.url.startswith("https://127.0.0.1:")
        with pytest.raises(EndpointError, match=r"not trusted: .*; set SSL_CERT_FILE=FILE"):
            await probe_endpoint(EndpointOptions(fake.url))
        with pytest.raises(EndpointError, match="if it uses TLS, write https://"):
            await probe_endpoint(EndpointOptions(fake.url.replace("https", "http")))
        monkeypatch.setenv("SSL_CERT_FILE", str(known))
        assert (await probe_endpoint(EndpointOptions(fake.url))).model == "fake"
        elsewhere = fake.url.replace("127.0.0.1", "localhost")
        with pytest.raises(EndpointError, match="not trusted: ") as caught:
            await probe_endpoint(EndpointOptions(elsewhere))
    assert "SSL_CERT_FILE" not in str(caught.value)  # no authority can fix a wrong name

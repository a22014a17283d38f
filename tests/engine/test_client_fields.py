"""The router knows all fields and headers that vLLM reads of a request.

Read from vLLM's sources, so that additions of a new release fail here.
"""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from proxy.core.model.route_table import ROUTES, PromptFields, route_names
from proxy.core.request.client_fields import HEADERS
from tests.upstream.source import differences_from_table, installed_release

WITH_SALT = route_names(lambda route: route.salted)
SPEC = find_spec("vllm")
ROOT = Path(SPEC.origin).parent if SPEC and SPEC.origin else Path()
SOURCES = sorted((ROOT / "entrypoints").rglob("*.py"))
# The body classes of each route; several of one route must agree.
BODIES = {
    "chat/completions": ["ChatCompletionRequest"],
    "chat/completions/batch": ["BatchChatCompletionRequest"],
    "completions": ["CompletionRequest"],
    "responses": ["ResponsesRequest"],
    "messages": ["AnthropicMessagesRequest"],
    "cohere/v2/chat": ["CohereChatV2Request"],
    "v2/embed": ["CohereEmbedRequest"],
    "embeddings": ["EmbeddingCompletionRequest", "EmbeddingChatRequest"],
    "pooling": ["PoolingCompletionRequest", "PoolingChatRequest", "IOProcessorRequest"],
    "classify": ["ClassificationCompletionRequest", "ClassificationChatRequest"],
    "score": ["ScoreTextRequest", "ScoreDataRequest", "ScoreQueriesDocumentsRequest"],
    "rerank": ["RerankRequest"],
    "v2/rerank": ["RerankRequest"],
    "generative_scoring": ["GenerativeScoringRequest"],
    "systemone": ["StructuredDecisionRequest"],
    "inference/v1/generate": ["GenerateRequest"],
    "audio/transcriptions": ["TranscriptionRequest"],
    "audio/translations": ["TranslationRequest"],
}
# Fields that the router checks (see `client_fields`), and the routes that have them.
TEXTS = {"chat/completions", "completions", "responses", "messages"}
CHECKED_FIELDS = {
    "kv_transfer_params": {*TEXTS, "cohere/v2/chat", "inference/v1/generate"},
    "ec_transfer_params": {*TEXTS, "inference/v1/generate"},
    "vllm_xargs": {*TEXTS, "audio/transcriptions", "audio/translations"},
    "sampling_params": {"inference/v1/generate"},
    "stream_interval": {"chat/completions", "completions"},
    "stream_options": {"chat/completions", "completions", "inference/v1/generate"},
    "request_id": WITH_SALT - {"messages"},
    "model": BODIES.keys(),
    "priority": route_names(lambda route: route.takes_priority),
    "cache_salt": WITH_SALT,
}
# All other fields: they affect only their own request. A new field of a release fails here until it
# is judged: a field that steers a transfer, names a worker or another request, or gives priority
# belongs in `client_fields`.
HARMLESS_FIELDS = """
    add_generation_prompt add_special_tokens allowed_token_ids apply_softmax audio background
    bad_words best_of chat_template chat_template_kwargs citation_options content_parts
    continue_final_message data data_1 data_2 dimensions documents early_stopping echo
    embed_dtype embedding_types enable_response_messages encoding_format endianness features
    field_names file frequency_penalty guided_decoding_backend hotwords ignore_eos images
    include include_reasoning include_stop_str_in_output input input_type inputs instruction
    instructions item_first items k label_token_ids language length_penalty logit_bias
    logprob_token_ids logprobs max_completion_tokens max_output_tokens max_tokens
    max_tokens_per_doc max_tokens_per_query max_tool_calls media_io_kwargs messages metadata
    min_p min_tokens mm_payload mm_processor_kwargs n output_config output_dimension
    output_mode p padding parallel_tool_calls presence_penalty previous_input_messages
    previous_response_id prompt prompt_cache_key prompt_embeds prompt_logprobs queries query
    questions reasoning reasoning_effort reasoning_ended reasoning_parser_kwargs
    repetition_detection repetition_penalty response_format return_mm_kwargs
    return_prompt_text return_token_ids return_token_offsets return_tokens_as_token_ids
    routed_experts_prompt_start safety_mode seed service_tier session_id skip_special_tokens
    spaces_between_special_tokens state stop stop_sequences stop_token_ids store stream
    stream_continuous_usage_stats stream_include_usage strict_tools structured_outputs suffix
    system task temperature text text_1 text_2 texts thinking thinking_token_budget
    timestamp_granularities to_language token_ids token_offsets tool_choice tools top_k
    top_logprobs top_n top_p truncate truncate_prompt_tokens truncation truncation_side
    use_activation use_beam_search user videos watermarking
"""
if installed_release() >= (0, 33):
    HARMLESS_FIELDS += """
        joint parse_context prompt_cache_options prompt_cache_retention return_weight_versions
        safety_identifier
    """
# The same for `sampling_params`, whose `extra_args` are checked.
HARMLESS_SAMPLING_FIELDS = """
    _all_stop_token_ids _bad_words_token_ids _eos_token_id _watermarking_skipped
    allowed_token_ids bad_words detokenize flat_logprobs frequency_penalty ignore_eos
    include_stop_str_in_output logit_bias logprob_token_ids logprobs max_tokens min_p
    min_tokens n output_kind output_text_buffer_length presence_penalty prompt_logprob_start
    prompt_logprob_token_ids prompt_logprobs repetition_detection repetition_penalty
    routed_experts_prompt_start seed skip_clone skip_reading_prefix_cache skip_special_tokens
    spaces_between_special_tokens stop stop_token_ids stream_interval structured_outputs
    temperature thinking_token_budget top_k top_p trace_decode_token_ids watermarking
"""
# Headers that the server reads and that affect only their own request.
HARMLESS_HEADERS = {"authorization", "content-type", "x-session-id", "x-request-id"}
READ = re.compile(r"""headers(?:\.get\(|\[)\s*(?:"([\w-]+)"|([A-Z_]+))""")


def own_fields(node: ast.ClassDef) -> set[str]:
    return {
        child.target.id
        for child in node.body
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name)
    }


def classes() -> dict[str, tuple[set[str], list[str]]]:
    found: dict[str, tuple[set[str], list[str]]] = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base).split("[")[0] for base in node.bases]
                found[node.name] = own_fields(node), bases
    return found


@pytest.fixture(scope="module")
def known() -> dict[str, tuple[set[str], list[str]]]:
    return classes()


def fields(known: dict[str, tuple[set[str], list[str]]], name: str) -> set[str]:
    own, bases = known.get(name, (set[str](), []))
    return own.union(*(fields(known, base) for base in bases if base != name))


@pytest.mark.parametrize("member", CHECKED_FIELDS)
def test_checked_fields_agree_with_the_table(
    known: dict[str, tuple[set[str], list[str]]], member: str
) -> None:
    having = {
        route: [member in fields(known, body) for body in bodies]
        for route, bodies in BODIES.items()
    }
    routes = {route for route, has in having.items() if any(has)}
    assert differences_from_table(routes, CHECKED_FIELDS[member]) == {}
    if member in ("priority", "cache_salt"):
        assert all(any(has) == all(has) for has in having.values())


def test_every_other_field_is_known_as_harmless(
    known: dict[str, tuple[set[str], list[str]]],
) -> None:
    bodies = [body for each in BODIES.values() for body in each]
    members = set[str]().union(*(fields(known, body) for body in bodies))
    outside = {member for member in members if not member.startswith("_")}
    assert (
        differences_from_table(outside - CHECKED_FIELDS.keys(), set(HARMLESS_FIELDS.split())) == {}
    )


def test_every_sampling_field_is_known_as_harmless() -> None:
    tree = ast.parse((ROOT / "sampling_params.py").read_text())
    [sampling] = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name == "SamplingParams"
    )
    judged = set(HARMLESS_SAMPLING_FIELDS.split())
    assert differences_from_table(own_fields(sampling) - {"extra_args"}, judged) == {}


def test_every_route_that_costs_tokens_is_checked() -> None:
    costly = {route.name for route in ROUTES.values() if route.shape is not PromptFields.OPAQUE}
    assert costly ^ BODIES.keys() == set(), "BODIES names the body's class of each route"


def test_headers_that_vllm_reads_are_known() -> None:
    read: set[str] = set()
    for path in SOURCES:
        text = path.read_text()
        for name, constant in READ.findall(text):
            value = name or re.findall(rf'^{constant}\w*\s*=\s*"([\w-]+)"', text, re.MULTILINE)[0]
            read.add(value.lower())
    assert read <= HARMLESS_HEADERS | {name.decode() for name in HEADERS}
    assert {"x-vllm-priority", "x-data-parallel-rank"} <= read, "no header was found"


def test_settings_named_in_security_md_exist_in_vllm() -> None:
    page = (Path(__file__).parents[2] / "SECURITY.md").read_text()
    sources = (ROOT / "engine" / "arg_utils.py").read_text(), (ROOT / "envs.py").read_text()
    for name, source in (
        ("--allowed-media-domains", sources[0]),
        ("--allowed-local-media-path", sources[0]),
        ("VLLM_MEDIA_URL_ALLOW_REDIRECTS", sources[1]),
    ):
        assert name in page
        assert name in source

"""What vLLM reads of a request's head and body is what the router believes it reads.

From the sources, so that a new release shows here what it has added.
"""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from proxy.core.client_fields import HEADERS, WITH_PRIORITY, WITH_SALT
from proxy.core.routes import ROUTES, Shape

SPEC = find_spec("vllm")
ROOT = Path(SPEC.origin).parent if SPEC and SPEC.origin else Path()
SOURCES = sorted((ROOT / "entrypoints").rglob("*.py"))
# Whose body is whose; where there are several, all of them must agree.
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
# Read from heads by the server itself, and of no consequence to others.
HARMLESS = {"authorization", "content-type", "x-session-id", "x-request-id"}
READ = re.compile(r"""headers(?:\.get\(|\[)\s*(?:"([\w-]+)"|([A-Z_]+))""")


def classes() -> dict[str, tuple[set[str], list[str]]]:
    """Read every class: its own fields, and its bases."""
    found: dict[str, tuple[set[str], list[str]]] = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                own = {
                    each.target.id
                    for each in node.body
                    if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
                }
                bases = [ast.unparse(base).split("[")[0] for base in node.bases]
                found[node.name] = own, bases
    return found


@pytest.fixture(scope="module")
def known() -> dict[str, tuple[set[str], list[str]]]:
    return classes()


def fields(known: dict[str, tuple[set[str], list[str]]], name: str) -> set[str]:
    own, bases = known.get(name, (set[str](), []))
    return own.union(*(fields(known, base) for base in bases if base != name))


@pytest.mark.parametrize(
    ("member", "routes"), [("priority", WITH_PRIORITY), ("cache_salt", WITH_SALT)]
)
def test_bodies(
    known: dict[str, tuple[set[str], list[str]]], member: str, routes: frozenset[str]
) -> None:
    has = {
        route
        for route, bodies in BODIES.items()
        if all(member in fields(known, body) for body in bodies)
    }
    some = {
        route
        for route, bodies in BODIES.items()
        if any(member in fields(known, body) for body in bodies)
    }
    assert has == some
    assert has == routes


def test_every_route_that_costs_tokens_is_looked_at() -> None:
    costly = {route.name for route in ROUTES.values() if route.shape is not Shape.OPAQUE}
    assert costly == BODIES.keys()


def test_heads() -> None:
    read: set[str] = set()
    for path in SOURCES:
        text = path.read_text()
        for name, constant in READ.findall(text):
            value = name or re.findall(rf'^{constant}\w*\s*=\s*"([\w-]+)"', text, re.MULTILINE)[0]
            read.add(value.lower())
    assert read <= HARMLESS | {name.decode() for name in HEADERS}
    assert {"x-vllm-priority", "x-data-parallel-rank"} <= read, "or nothing is found at all"

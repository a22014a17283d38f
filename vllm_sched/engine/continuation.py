"""Requests that another engine began, and that bring the tokens which it returned.

The tokens (`vllm_xargs: {"output_so_far": [...]}`) are computed as the end of the prompt. They are
returned again with the first new token, so that the server's text, stop strings, parsers and usage
are those of one response. A grammar goes on behind them.

How it fails: to samplers they are part of the prompt. Presence and frequency penalties do not count
them, and a seed starts anew.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Final

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from vllm_sched.engine.vllm_compat import UpstreamScheduler

logger = logging.getLogger("vllm.vllm_sched")

OUTPUT_SO_FAR: Final = "output_so_far"
# Reasoning parsers may take quadratic time to find the end of the reasoning.
MAX_REASONING_TOKENS: Final = 4096


class ContinuedRequests:
    def __init__(
        self,
        max_model_len: int,
        vocabulary: int,
        grammars: StructuredOutputManager,
        block_tokens: int,
    ) -> None:
        self.returned: dict[str, list[int]] = {}  # first tokens of running requests
        self.unseen_by_grammar: dict[str, list[int]] = {}  # of a grammar that is not compiled
        self._pending: dict[str, list[int]] = {}  # not returned yet
        self._ended: list[str] = []  # in this step
        self._max_model_len = max_model_len
        self._vocabulary = vocabulary
        self._grammars = grammars
        self._block_tokens = block_tokens

    def begin(self, request: Request) -> None:
        """Make a request's first output tokens the end of its prompt."""
        tokens = output_so_far(request)
        if not tokens or not self._may_continue(request, tokens):
            return
        request.append_output_token_ids(tokens)
        request._output_token_ids.clear()
        request.prompt_token_ids = [*request._all_token_ids]
        request.num_prompt_tokens = request.num_tokens
        request.max_tokens -= len(tokens)
        parameters = request.sampling_params
        if parameters is not None and parameters.min_tokens:
            request.sampling_params = parameters.clone()
            request.sampling_params.min_tokens = max(parameters.min_tokens - len(tokens), 0)
        self._pending[request.request_id] = tokens
        if request.structured_output_request is not None:
            self.unseen_by_grammar[request.request_id] = tokens

    def advance_grammar(self, request: Request) -> None:
        """Let the grammar of a waiting request accept its first tokens, once it is compiled."""
        tokens = self.unseen_by_grammar.get(request.request_id)
        structured = request.structured_output_request
        if tokens is None or structured is None or not structured.is_grammar_ready:
            return
        del self.unseen_by_grammar[request.request_id]
        if isinstance(structured.grammar, Exception):
            return
        error: Exception = ValueError("the grammar rejects the output so far")
        try:
            if self._grammars.accept_tokens(request, tokens):
                return
        except Exception as failure:  # would end the engine; clients may send any tokens
            error = failure
        logger.warning("request %s is not continued: %s", request.request_id, error)
        # vLLM ends the request with an error, as if the grammar was not compiled.
        rejected: Future[StructuredOutputGrammar] = Future()
        rejected.set_exception(error)
        structured.grammar = rejected

    def return_first_tokens(self, outputs: Mapping[int, EngineCoreOutputs]) -> None:
        """Put the first tokens before the first new one."""
        if self._pending:
            for of_client in outputs.values():
                for output in of_client.outputs:
                    if output.new_token_ids:
                        self._prepend_tokens(output)
        for request_id in self._ended:
            self._pending.pop(request_id, None)
            self.unseen_by_grammar.pop(request_id, None)
            self.returned.pop(request_id, None)
        self._ended.clear()

    def end(self, request: Request) -> None:
        if request.request_id in self._pending or request.request_id in self.returned:
            self._ended.append(request.request_id)

    def _may_continue(self, request: Request, tokens: list[int]) -> bool:
        parameters = request.sampling_params
        return (
            parameters is not None
            and parameters.logprobs is None
            and parameters.prompt_logprobs is None
            and self._may_advance_grammar(request, len(tokens))
            and request.prompt_embeds is None
            and not request.resumable
            and max(tokens) < self._vocabulary
            and len(tokens) < request.max_tokens
            and request.num_tokens + len(tokens) < self._max_model_len
        )

    def _may_advance_grammar(self, request: Request, tokens: int) -> bool:
        structured = request.structured_output_request
        if structured is None or self._grammars.reasoner_cls is None:
            return True
        # None: vLLM would look for the end of the reasoning in the prompt.
        ended = structured.reasoning_ended
        return ended is not None and (ended or tokens <= MAX_REASONING_TOKENS)

    def _prepend_tokens(self, output: EngineCoreOutput) -> None:
        if tokens := self._pending.pop(output.request_id, None):
            output.new_token_ids = tokens + output.new_token_ids
            self.returned[output.request_id] = tokens
            self._exclude_from_usage(len(tokens), output.prefill_stats)

    def _exclude_from_usage(self, tokens: int, stats: PrefillStats | None) -> None:
        """Count the prompt without these tokens, because the client's usage shows the counts."""
        if stats is None or stats.num_prompt_tokens < tokens:
            return
        prompt = stats.num_prompt_tokens - tokens
        left = prompt // self._block_tokens * self._block_tokens
        local = min(stats.num_local_cached_tokens, left)
        external = min(stats.num_external_cached_tokens, left - local)
        stats.set(prompt, local, external)
        if hasattr(stats, "num_cache_creation_tokens"):  # not in every vLLM
            created = stats.num_cache_creation_tokens
            stats.num_cache_creation_tokens = min(created, left - local - external)


def output_so_far(request: Request) -> list[int]:
    """Return the tokens that a request brings; none if they are no list of token ids."""
    extra = request.sampling_params and request.sampling_params.extra_args
    tokens = (extra or {}).get(OUTPUT_SO_FAR)
    if not isinstance(tokens, list) or not all(type(t) is int and t >= 0 for t in tokens):
        return []
    return tokens


class ContinuationMixin(UpstreamScheduler):
    # vLLM's tests make schedulers without `__init__`.
    _continued: ContinuedRequests | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        vocabulary = self.vllm_config.model_config.get_vocab_size()
        grammars = self.structured_output_manager
        block = self.cache_config.block_size
        self._continued = ContinuedRequests(self.max_model_len, vocabulary, grammars, block)

    def add_request(self, request: Request) -> None:
        if self._continued is not None and request.request_id not in self.requests:
            self._continued.begin(request)
        super().add_request(request)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        if self._continued is not None and self._continued.unseen_by_grammar:
            self._continued.advance_grammar(request)
        return bool(super()._handle_blocked_waiting_request(request))

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(*args, **kwargs)
        if self._continued is not None:
            self._continued.return_first_tokens(outputs)
        return outputs

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        freed = super()._free_request(request, *args, **kwargs)
        if self._continued is not None:
            self._continued.end(request)
        return freed

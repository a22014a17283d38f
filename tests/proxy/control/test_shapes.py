"""What the admin API makes of a question."""

from __future__ import annotations

import pytest

from proxy.control.shapes import Question, ask_of


@pytest.mark.parametrize(
    ("max_tokens", "expected", "long"),
    [
        (None, 256, False),  # the usual
        (50, 50, False),
        (500, 256, False),  # may write 500, usually 256
        (501, 256, True),
    ],
)
def test_a_question_is_sized_as_a_chat_would_be(
    max_tokens: int | None, expected: int, long: bool
) -> None:
    question = Question(prompt_tokens=500, max_tokens=max_tokens)
    ask = ask_of(question, "tiny", usual_output=256, short_limit=1000)
    assert (ask.prompt_tokens, ask.prompt_error, ask.largest_prompt) == (500, 0, 500)
    assert (ask.output_tokens, ask.expected_output) == (max_tokens, expected)
    assert ask.long is long
    assert ask.counted

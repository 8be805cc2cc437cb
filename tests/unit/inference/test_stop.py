"""Stop strings over tokens that are parts of characters."""

from collections.abc import Sequence

import numpy as np
import pytest

from rollmesh.services.inference.engines.common.stop import STOP_ID, STOP_TEXT, StopRules
from rollmesh.shared.domain.trajectory import SamplingParams


def read_bytes(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode("utf-8", errors="replace")


def first_stop(text: str, *stop: str) -> int:
    """Return the number of byte tokens after which generation of `text` stops; -1 if it does not."""
    rules, tokens = StopRules(256, read_bytes), np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    marks = rules.marks(SamplingParams(stop=stop))
    for num in range(1, len(tokens) + 1):
        if marks[tokens[num - 1]] & STOP_TEXT and rules.ends_text(tokens[:num], stop):
            return num
    return -1


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("abcdef", ("cd",), 4),
        ("abcdef", ("ef", "bc"), 3),
        ("a\u00e9b", ("\u00e9",), 3),  # the second byte completes it
        ("na\u00efve \U0001f600!", ("\U0001f600",), len("na\u00efve \U0001f600".encode())),
        ("x" * 500 + "</answer>", ("</answer>",), 509),
        ("abcabd", ("abx",), -1),
    ],
)
def test_stop_string_is_found_at_its_last_token(text: str, stop: tuple[str, ...], expected: int) -> None:
    assert first_stop(text, *stop) == expected


def test_only_tokens_that_can_complete_a_stop_are_marked() -> None:
    marks = StopRules(128, read_bytes).marks(SamplingParams(stop=("ab",), stop_token_ids=(7,)))
    assert np.flatnonzero(marks & STOP_TEXT).tolist() == [ord("b")]
    assert np.flatnonzero(marks & STOP_ID).tolist() == [7]


def test_stop_strings_without_a_tokenizer_are_refused_with_the_remedy() -> None:
    rules = StopRules(8, None)
    rules.check(SamplingParams(stop_token_ids=(1,)), where="request")
    with pytest.raises(ValueError, match="stop_token_ids"):
        rules.check(SamplingParams(stop=("a",)), where="request")

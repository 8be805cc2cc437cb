"""The text of a turn as its tokens arrive: whole characters, without what ends the turn."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.services.rollout.tokenizer import ChatTokenizer, load_tokenizer
from rollmesh.services.rollout.turn_text import TurnText
from rollmesh.shared.domain.trajectory import IntArray
from tests.unit.rollout.chat_tokenizers import MODELS, save_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder, **MODELS["qwen3"])
    return load_tokenizer(folder)


def pieces(tokenizer: ChatTokenizer, ids: IntArray, *, size: int, stop: tuple[str, ...] = ()) -> list[str]:
    text = TurnText(tokenizer, stop)
    return [*(text.feed(ids[at : at + size]) for at in range(0, ids.size, size)), text.finish()]


@pytest.mark.parametrize("size", [1, 2, 100])
def test_the_pieces_are_the_text_without_the_end_of_the_turn(tokenizer: ChatTokenizer, size: int) -> None:
    said = "Grüße 👩‍👩‍👧 <|im 漢字 </tool_call>\n"
    for end in ("<|im_end|>", ""):
        assert "".join(pieces(tokenizer, tokenizer.encode_markup(said + end), size=size)) == said


def test_a_character_arrives_whole(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode_text("é👩")
    assert ids.size == 6
    assert pieces(tokenizer, ids, size=1) == ["", "é", "", "", "", "👩", ""]


def test_bytes_that_are_no_character_are_returned_at_the_end(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode_text("a👩")[:3]
    assert pieces(tokenizer, ids, size=1) == ["a", "", "", "\ufffd"]
    assert pieces(tokenizer, np.concatenate([ids, tokenizer.encode_text("b")]), size=1)[:4] == ["a", "", "", "\ufffdb"]


def test_what_may_become_the_end_of_a_turn_is_held_back(tokenizer: ChatTokenizer) -> None:
    text = TurnText(tokenizer)
    assert text.feed(tokenizer.encode_text("a <|im_")) == "a "
    assert text.feed(tokenizer.encode_text("end|>")) == ""
    assert text.feed(tokenizer.encode_text("b")) == "<|im_end|>b"
    assert text.feed(tokenizer.encode_markup("<|im_end|>")) == ""
    assert text.finish() == ""


@pytest.mark.parametrize("size", [1, 3, 100])
def test_the_text_ends_before_a_stop_string(tokenizer: ChatTokenizer, size: int) -> None:
    ids = tokenizer.encode_text("one\nObservation: two")
    assert "".join(pieces(tokenizer, ids, size=size, stop=("\nObservation:", "two"))) == "one"
    assert "".join(pieces(tokenizer, ids, size=size, stop=("three", "twos"))) == "one\nObservation: two"


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="aé👩<|im_end>\n ", max_size=30),
    cuts=st.lists(st.integers(0, 120), max_size=8),
    stop=st.sampled_from([(), ("a",), ("<|", "\n a")]),
)
def test_the_text_does_not_depend_on_how_the_tokens_arrive(
    tokenizer: ChatTokenizer, text: str, cuts: list[int], stop: tuple[str, ...]
) -> None:
    ids = tokenizer.encode_text(text)
    decoder = TurnText(tokenizer, stop)
    bounds = [0, *sorted(min(cut, ids.size) for cut in cuts), ids.size]
    seen = "".join(decoder.feed(ids[start:end]) for start, end in itertools.pairwise(bounds))
    expected = min((text[: text.index(word)] for word in stop if word in text), key=len, default=text)
    assert seen + decoder.finish() == (expected if expected != text else text.removesuffix("<|im_end|>"))

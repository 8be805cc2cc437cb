"""The words of a conversation come from the model's chat template, for templates in the style of released models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollmesh.services.rollout.agents.tool_calling import ToolCall, parse_call
from rollmesh.services.rollout.chat_format import ChatFormat
from rollmesh.services.rollout.config import FormatConfig, ToolConfig
from rollmesh.services.rollout.tokenizer import ChatTokenizer, load_tokenizer
from rollmesh.services.rollout.tools import tool_schema
from rollmesh.shared.domain.trajectory import Message
from rollmesh.shared.errors import ConfigError
from rollmesh.testing.rollout import DEMO_FORMAT
from tests.newcomer.chat_models import STYLES, save_chat_tokenizer

TOOL = tool_schema("add", ToolConfig(profile="calc", function="call", description="Add two numbers."))
QUESTION = [Message(role="user", content="1+2")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name in STYLES:
        save_chat_tokenizer(name, root / name)
    return {name: root / name for name in STYLES}


def loaded(folders: dict[str, Path], name: str, **words: Any) -> ChatTokenizer:
    return load_tokenizer(folders[name], FormatConfig(**words))


EXPECTED = {
    "chatml": ChatFormat(
        turn_ends=("<|im_end|>", "<|endoftext|>"),
        tool_call_start="<tool_call>",
        tool_call_end="</tool_call>",
        tool_call_body="json",
        observation="\n<|im_start|>user\n<tool_response>\n{text}\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    ),
    "llama3": ChatFormat(
        turn_ends=("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
        tool_call_start="",
        tool_call_end="",
        tool_call_body="json",
        observation="<|start_header_id|>ipython<|end_header_id|>\n\n{text}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "mistral": ChatFormat(
        turn_ends=("</s>",),
        tool_call_start="[TOOL_CALLS]",
        tool_call_end="",
        tool_call_body="json",
        observation='[TOOL_RESULTS] {"content": {text}, "call_id": "rollmesh0"}[/TOOL_RESULTS]',
    ),
    "gemma": ChatFormat(
        turn_ends=("<end_of_turn>", "<eos>"),
        tool_call_start="<tool_call>",
        tool_call_end="</tool_call>",
        tool_call_body="json",
        observation="\n<start_of_turn>user\n{text}<end_of_turn>\n<start_of_turn>model\n",
        renders_tools=False,
        renders_results=False,
    ),
}


@pytest.mark.parametrize("name", STYLES)
def test_the_words_are_what_the_chat_template_writes(folders: dict[str, Path], name: str) -> None:
    assert loaded(folders, name).format == EXPECTED[name]


def test_the_demo_needs_no_words_in_its_configuration(tmp_path: Path) -> None:
    from rollmesh.demo.tokenizer import build_tokenizer
    from rollmesh.trainer.model_files import save_tokenizer

    save_tokenizer(build_tokenizer(), tmp_path)
    assert load_tokenizer(tmp_path).format == DEMO_FORMAT


@pytest.mark.parametrize("name", STYLES)
def test_a_conversation_grown_by_turns_equals_the_rendered_one(folders: dict[str, Path], name: str) -> None:
    from transformers import AutoTokenizer

    ours, theirs = loaded(folders, name), AutoTokenizer.from_pretrained(folders[name])
    said = "I add"
    if name == "mistral":
        said = " I add"  # its template writes a space first
    before, after = ours.format.frame
    text = ours.decode(ours.encode_prompt(QUESTION, ())) + said + ours.format.turn_end + before + "3" + after
    role = "user" if name == "gemma" else "tool"
    result = {"role": role, "content": "3", "tool_call_id": "rollmesh0"}
    turns = [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "I add"}, result]
    assert text == theirs.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("name", STYLES)
def test_a_tool_is_in_the_prompt_with_description_and_schema(folders: dict[str, Path], name: str) -> None:
    ours = loaded(folders, name)
    prompt = ours.decode(ours.encode_prompt(QUESTION, [TOOL]))
    described = {"description": "Add two numbers.", "parameters": TOOL["function"]["parameters"]}
    for value in described.values():
        assert json.dumps(value).replace(" ", "") in prompt.replace(" ", "").replace("\n", "")
    if not ours.format.renders_tools:
        assert '<tool_call>{"name": NAME, "arguments": {...}}</tool_call>' in prompt


@pytest.mark.parametrize(
    ("name", "turn", "call"),
    [
        ("chatml", '<tool_call>\n{"name": "add", "arguments": {"text": "1+2"}}\n</tool_call><|im_end|>', "1+2"),
        ("chatml", '<tool_call>\n{"name": "add", "arguments": {"text": "1+2"}}\n</tool_call><|endoftext|>', "1+2"),
        ("llama3", '{"name": "add", "parameters": {"text": "1+2"}}<|eot_id|>', "1+2"),
        ("llama3", "The answer is 3.<|eot_id|>", None),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"text": "1+2"}, "id": "rollmesh0"}]</s>', "1+2"),
        ("gemma", '<tool_call>{"name": "add", "arguments": "1+2"}</tool_call><end_of_turn>', "1+2"),
    ],
)
def test_a_call_in_the_models_own_words_is_understood(
    folders: dict[str, Path], name: str, turn: str, call: str | None
) -> None:
    expected = ToolCall("add", call) if call is not None else None
    assert parse_call(turn, loaded(folders, name).format, ["add"]) == expected


@pytest.mark.parametrize(
    ("turn_end", "why"),
    [("<|end|>", "the model has no such token"), ("<|im_start|>", "the chat template never writes it there")],
)
def test_a_wrong_turn_end_is_rejected_with_what_the_template_writes(
    folders: dict[str, Path], turn_end: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.format\.turn_end.*<\|im_end\|>") as caught:
        _ = loaded(folders, "chatml", turn_end=turn_end).format
    assert why in str(caught.value)


def test_configured_words_come_before_those_of_the_template(folders: dict[str, Path]) -> None:
    words = loaded(folders, "chatml", tool_call_start="<call>", tool_call_body="bare", observation="[{text}]").format
    assert (words.tool_call_start, words.tool_call_body, words.frame) == ("<call>", "bare", ("[", "]"))
    assert words.turn_end == "<|im_end|>"


def test_a_template_that_ends_no_turn_stops_at_the_eos_token(tmp_path: Path) -> None:
    save_chat_tokenizer("mistral", tmp_path)
    plain = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(plain)
    with pytest.raises(ConfigError, match=r"rollout\.format\.observation"):
        _ = load_tokenizer(tmp_path).format
    assert load_tokenizer(tmp_path, FormatConfig(observation="{text}")).format.turn_ends == ("</s>",)

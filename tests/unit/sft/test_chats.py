"""Conversations of a file become samples: their tokens are those of the chat template, and only turns of the assistant
are trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.services.rollout.tokenizer import load_tokenizer
from rollmesh.sft.chats import EncodedChat, encode_chat, read_chats
from rollmesh.shared.errors import InvalidInput
from tests.newcomer.chat_models import STYLES
from tests.unit.rollout.chat_tokenizers import ADD, MODELS, save_all, save_tokenizer

ROOT = Path(__file__).parents[3]
NAMES = (*STYLES, *MODELS)
AROUND_TURNS = {"glm45": ("<think></think>\n", "<|user|>")}
"""What a template writes before a turn, and what ends the last one, if it is not the end of every turn."""
TEXT_ARGUMENTS = {"deepseek_r1"}
"""Templates that reject arguments as an object."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_all(tmp_path_factory.mktemp("models"))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def called(arguments: str) -> dict[str, Any]:
    call = {"id": "callcall0", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": "callcall0"}


def encoded(folder: Path, messages: list[dict[str, Any]], **more: Any) -> EncodedChat:
    return encode_chat(json.dumps({"messages": messages, **more}).encode(), load_tokenizer(folder), name="f:1")


def written(folder: Path, messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
    """The text of transformers up to the end of the last turn of the assistant."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    plain = json.loads(json.dumps(messages))
    for message in plain:
        for call in message.get("tool_calls", ()) if folder.name not in TEXT_ARGUMENTS else ():
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    text = theirs.apply_chat_template(plain, tools=tools, tokenize=False)
    assert isinstance(text, str)
    if folder.name in AROUND_TURNS:
        return text + AROUND_TURNS[folder.name][1]
    end = load_tokenizer(folder).format.turn_end
    return text[: text.rindex(end) + len(end)]


TALKS: dict[str, tuple[list[dict[str, Any]], list[Any] | None]] = {
    "one turn": ([user("1+2"), said("It is 3.")], None),
    "two turns": ([user("1+2"), said("3"), user("and 4?"), said("It is 7.")], None),
    "system": ([{"role": "system", "content": "Be brief."}, user("1+2"), said("3")], None),
    "a call": ([user("1+2"), called('{"a": 1}'), result("3"), said("It is 3.")], [ADD]),
}


NOT_WRITTEN = {("gemma", "system"), ("gemma", "a call"), ("mistral", "system"), ("mistral", "a call")}
"""Templates reject a system message, write calls as text, or move the tools after the turn."""


@pytest.mark.parametrize(
    ("name", "talk"), [(name, talk) for name in NAMES for talk in TALKS if (name, talk) not in NOT_WRITTEN]
)
def test_tokens_are_those_of_the_chat_template(folders: dict[str, Path], name: str, talk: str) -> None:
    messages, tools = TALKS[talk]
    tokenizer = load_tokenizer(folders[name])
    chat = encoded(folders[name], messages, **({"tools": tools} if tools else {}))
    assert tokenizer.decode(chat.sequence.token_ids) == written(folders[name], messages, tools)


def test_a_message_that_the_template_rejects_is_an_error(folders: dict[str, Path]) -> None:
    with pytest.raises(InvalidInput, match="role system is not supported"):
        encoded(folders["gemma"], *TALKS["system"][:1])


def test_tools_stay_where_a_rollout_has_them(folders: dict[str, Path]) -> None:
    """The template of Mistral writes the tools before the last message of the user, if no turn follows it."""
    chat = encoded(folders["mistral"], TALKS["a call"][0], tools=[ADD])
    text = load_tokenizer(folders["mistral"]).decode(chat.sequence.token_ids)
    assert text.startswith("<s>[AVAILABLE_TOOLS]")
    assert text.endswith(written(folders["mistral"], TALKS["a call"][0], [ADD]).removeprefix("<s>"))


def test_calls_are_text_for_a_template_without_tools(folders: dict[str, Path]) -> None:
    chat = encoded(folders["gemma"], TALKS["a call"][0], tools=[ADD])
    tokenizer = load_tokenizer(folders["gemma"])
    trained = [tokenizer.decode(s.token_ids) for s in chat.sample.segments if s.num_trainable]
    assert '{"name": "add", "arguments": {"a": 1}}' in trained[0]


@pytest.mark.parametrize("name", NAMES)
def test_only_turns_of_the_assistant_and_their_ends_are_trained(folders: dict[str, Path], name: str) -> None:
    tokenizer = load_tokenizer(folders[name])
    chat = encoded(folders[name], [user("1+2"), said("It is 3."), user("and 4?"), said("7"), user("thanks")])
    begin, end = AROUND_TURNS.get(name, ("", tokenizer.format.turn_end))
    trained = [tokenizer.decode(s.token_ids).strip() for s in chat.sample.segments if s.num_trainable]
    assert trained == [f"{begin}It is 3.{end}", f"{begin}7{end}"]
    assert chat.num_trained == int(chat.sequence.target_mask.sum())
    assert chat.num_tokens == len(chat.sequence.token_ids)


def test_white_space_between_a_turn_and_the_next_role_belongs_to_the_turn(tmp_path: Path) -> None:
    model = MODELS["glm45"]
    template = model["template"].replace("'user' %}<|user|>", "'user' %}{{ '\\n<|user|>' }}")
    save_tokenizer(tmp_path, **{**model, "template": template})
    tokenizer = load_tokenizer(tmp_path)
    chat = encoded(tmp_path, [user("1+2"), said("3"), user("and 4?"), said("7")])
    trained = [tokenizer.decode(s.token_ids).strip() for s in chat.sample.segments if s.num_trainable]
    assert trained == ["<think></think>\n3\n<|user|>", "<think></think>\n7\n<|user|>"]


def test_the_conversation_of_the_documentation_is_encoded(folders: dict[str, Path]) -> None:
    (text,) = [
        part for part in (ROOT / "docs" / "sft.md").read_text().split("```") if part.startswith('json\n{"tools"')
    ]
    example = json.loads(text.removeprefix("json\n"))
    for name in ("chatml", "llama3", "mistral", "qwen3"):
        tokenizer = load_tokenizer(folders[name])
        chat = encode_chat(json.dumps(example).encode(), tokenizer, name="f:1")
        trained = [tokenizer.decode(s.token_ids) for s in chat.sample.segments if s.num_trainable]
        assert '"name": "stock"' in trained[0]
        assert len(trained) == 2


def test_a_turn_of_weight_0_is_read_and_not_trained(folders: dict[str, Path]) -> None:
    messages = [user("1+2"), {**said("4"), "weight": 0}, user("sure?"), said("No, 3.")]
    chat = encoded(folders["chatml"], messages)
    tokenizer = load_tokenizer(folders["chatml"])
    assert "4<|im_end|>" in tokenizer.decode(chat.sequence.token_ids)
    targets = chat.sequence.token_ids[chat.sequence.target_mask == 1]
    assert tokenizer.decode(targets) == "No, 3.<|im_end|>"


def test_tags_in_contents_stay_text(folders: dict[str, Path]) -> None:
    chat = encoded(folders["chatml"], [user("<|im_end|>"), said("a <|im_start|> b")])
    tokenizer = load_tokenizer(folders["chatml"])
    start, end = (tokenizer.token_id(tag) for tag in ("<|im_start|>", "<|im_end|>"))
    ids = chat.sequence.token_ids
    assert [int(np.count_nonzero(ids == tag)) for tag in (start, end)] == [2, 2]
    assert tokenizer.decode(ids).endswith("a <|im_start|> b<|im_end|>")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ('{"messages": [{"role": "user", "content": "\xff"}]}', "not JSON"),  # Latin-1, not UTF-8
        ("[]", "`messages` must be a list of one or more objects, got"),
        ('{"prompt": "a", "completion": "b"}', "`messages` must be a list of one or more objects, got"),
        ('{"messages": ["hello"]}', "`messages` must be a list of one or more objects, got"),
        (json.dumps({"messages": [user("1+2")]}), "`messages` must have a turn of the assistant to train on"),
        (
            json.dumps({"messages": [user("1"), {**said("2"), "weight": 0}]}),
            "`messages` must have a turn of the assistant to train on, got none",
        ),
        (json.dumps({"messages": [said("hello")]}), "must not be assistant, which cannot begin a conversation"),
        (
            json.dumps({"messages": [user("1"), said("2"), said("3")]}),
            "must not be assistant after a turn of the assistant",
        ),
        (json.dumps({"messages": [{"role": "human", "content": "1"}, said("2")]}), r"messages\[0\].role"),
        (json.dumps({"messages": [user("1"), {"role": "assistant", "content": 3}]}), r"messages\[1\].content"),
        (json.dumps({"messages": [{**user("1"), "weight": 0}, said("2")]}), r"messages\[0\].weight"),
        (json.dumps({"messages": [user("1"), {**said("2"), "weight": 2}]}), r"messages\[1\].weight"),
        (json.dumps({"messages": [user("1"), said("2")], "tools": [{"type": "web"}]}), r"tools\[0\].type"),
        (json.dumps({"messages": [user("1"), said("2")], "tools": 3}), "`tools` must be a list of tools, got 3"),
        (
            json.dumps({"messages": [user("1"), said("2"), result("3"), said("4")]}),
            r"`messages\[2\].tool_call_id` must be the id of a call in `tool_calls` of the assistant before it \(it has none\), got 'callcall0'",
        ),
        (
            json.dumps(
                {"messages": [user("1"), called("{}"), {**result("3"), "tool_call_id": "callcall1"}, said("4")]}
            ),
            r"`messages\[2\].tool_call_id` must .*\(callcall0\), got 'callcall1'",
        ),
        (
            json.dumps({"messages": [user("1"), called("{}"), result("3"), said("4"), result("3"), said("5")]}),
            r"`messages\[4\].tool_call_id` must .*\(it has none\)",
        ),
    ],
)
def test_a_wrong_line_names_its_field(folders: dict[str, Path], line: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        encode_chat(line.encode("latin-1"), load_tokenizer(folders["chatml"]), name="f:1")


def test_a_file_names_its_wrong_lines(folders: dict[str, Path], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folders["chatml"])
    good = json.dumps({"messages": [user("1+2"), said("3")], "source": "ignored"})
    file = tmp_path / "chats.jsonl"
    file.write_text(f"{good}\n\n{good}\n")
    assert [chat.name for chat in read_chats(file, tokenizer)] == ["chats:1", "chats:3"]
    file.write_text("\n".join([good, *["{}"] * 7]))
    with pytest.raises(
        InvalidInput, match=r"(?s)chats.jsonl:2: `messages` must be a list.*chats.jsonl:6: .*2 more lines are wrong"
    ):
        read_chats(file, tokenizer)
    file.write_text("\n")
    with pytest.raises(InvalidInput, match="there is no conversation"):
        read_chats(file, tokenizer)
    with pytest.raises(InvalidInput, match="No such file"):
        read_chats(tmp_path / "none.jsonl", tokenizer)

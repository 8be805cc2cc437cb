"""Messages appended to a recorded conversation: the tokens equal the template's rendering, and contents stay plain
text."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from rollmesh.services.rollout.conversation import (
    ChatMessage,
    RequestedCall,
    appended_tokens,
    ends_turn,
    prompt_tokens,
)
from rollmesh.services.rollout.tokenizer import ChatTokenizer, load_tokenizer
from rollmesh.shared.domain.trajectory import IntArray
from rollmesh.shared.errors import InvalidInput
from rollmesh.testing.rollout import CharTokenizer
from tests.newcomer.chat_models import save_chat_tokenizer
from tests.unit.rollout.chat_tokenizers import ADD, MODELS, save_all, save_tokenizer

CHATML = ("chatml", "qwen3")
LLAMA = ("llama3", "llama31", "pythonic")
MODEL_NAMES = (*CHATML, *LLAMA, "gemma", "mistral")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_all(tmp_path_factory.mktemp("models"))


def loaded(folders: dict[str, Path], name: str) -> tuple[ChatTokenizer, Any]:
    from transformers import AutoTokenizer

    return load_tokenizer(folders[name]), AutoTokenizer.from_pretrained(folders[name])


def user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


def said(text: str) -> ChatMessage:
    return ChatMessage(role="assistant", content=text)


def called(*arguments: str, text: str = "") -> ChatMessage:
    calls = [RequestedCall(id=f"callcall{n}", name="add", arguments=value) for n, value in enumerate(arguments)]
    return ChatMessage(role="assistant", content=text, calls=tuple(calls))


def result(text: str, number: int = 0) -> ChatMessage:
    return ChatMessage(role="tool", content=text, call_id=f"callcall{number}")


def as_json(message: ChatMessage) -> dict[str, Any]:
    """The message as a user of transformers writes it."""
    written: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.call_id:
        written["tool_call_id"] = message.call_id
    if message.calls:
        written["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.loads(c.arguments)}}
            for c in message.calls
        ]
    return written


def rendered(theirs: Any, messages: list[ChatMessage], tools: list[Any], *, prompt: bool = True) -> str:
    text: str = theirs.apply_chat_template(
        [as_json(m) for m in messages], tools=tools or None, add_generation_prompt=prompt, tokenize=False
    )
    return text


def turn_tokens(
    ours: ChatTokenizer, theirs: Any, before: list[ChatMessage], turn: ChatMessage, tools: list[Any]
) -> IntArray:
    """The tokens of a turn if the model writes what the template writes."""
    text = rendered(theirs, [*before, turn], tools, prompt=False).removeprefix(rendered(theirs, before, tools))
    return ours.encode_markup(text[: text.index(ours.format.turn_end)] + ours.format.turn_end)


def grown(ours: ChatTokenizer, theirs: Any, messages: list[ChatMessage], tools: list[Any]) -> list[int]:
    """The tokens of a conversation that grows turn by turn, as a client sends it."""
    turns = [at for at, message in enumerate(messages) if message.role == "assistant"]
    ids = [*prompt_tokens(ours, messages[: turns[0]], tools)]
    for at, following in itertools.zip_longest(turns, turns[1:]):
        turn = turn_tokens(ours, theirs, messages[:at], messages[at], tools)
        new = messages[at + 1 : following]
        ids += [*turn, *appended_tokens(ours, messages[: at + 1], turn, new, tools)]
    return [int(number) for number in ids]


TALK = {
    "plain": [user("1+2"), said("3"), user("and 4?"), said("7"), user("thanks")],
    "system": [ChatMessage(role="system", content="Be brief."), user("1+2"), said("It is 3."), user("sure?")],
    "white space": [user("\n\n1+2 "), said("It is 3.\n"), user("\n why?\n\n"), said("Because."), user(" \n")],
    "json and braces": [user("{{ 1 }} {% x %}"), said("{}"), user('{"a": "ü"}')],
}
CALLS = {
    "one call": [user("1+2"), called('{"a": 1}'), result("3"), said("It is 3."), user("ok")],
    "text and call": [user("1+2"), called('{"a": 1}', text="I add."), result("\n3\n"), said("3"), user("and?")],
    "two turns of calls": [user("1+2"), called('{"a": 1}'), result("3"), called('{"a": 2}'), result("4")],
    "no arguments": [user("1+2"), called("{}"), result('{"sum": 3}')],
}


@pytest.mark.parametrize("talk", TALK)
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_a_growing_conversation_equals_the_rendered_one(folders: dict[str, Path], name: str, talk: str) -> None:
    ours, theirs = loaded(folders, name)
    messages = TALK[talk]
    if name in ("gemma", "mistral"):  # without a system role
        messages = [message for message in messages if message.role != "system"]
    expected = theirs.apply_chat_template([as_json(m) for m in messages], add_generation_prompt=True, return_dict=False)
    assert grown(ours, theirs, messages, []) == expected


@pytest.mark.parametrize("talk", CALLS)
@pytest.mark.parametrize("name", [*CHATML, *LLAMA])
def test_calls_and_results_equal_the_rendered_ones(folders: dict[str, Path], name: str, talk: str) -> None:
    ours, theirs = loaded(folders, name)
    expected = theirs.apply_chat_template(
        [as_json(m) for m in CALLS[talk]], tools=[ADD], add_generation_prompt=True, return_dict=False
    )
    assert grown(ours, theirs, CALLS[talk], [ADD]) == expected


@pytest.mark.parametrize("name", [*CHATML, "pythonic"])
def test_results_of_parallel_calls_are_appended_as_the_template_writes_them(
    folders: dict[str, Path], name: str
) -> None:
    ours, theirs = loaded(folders, name)
    messages = [user("1+2"), called('{"a": 1}', '{"a": 2}'), result("3"), result("4", 1)]
    expected = theirs.apply_chat_template(
        [as_json(m) for m in messages], tools=[ADD], add_generation_prompt=True, return_dict=False
    )
    assert grown(ours, theirs, messages, [ADD]) == expected
    text = ours.decode(np.asarray(expected, dtype=np.int32))
    assert text.count("<tool_response>") in (0, 2)
    if name == "qwen3":
        assert text.count("<|im_start|>user") == 2  # the question, and one turn for both results


def test_parallel_calls_continue_under_a_template_that_rejects_them(folders: dict[str, Path]) -> None:
    ours, _ = loaded(folders, "llama31")
    history = [user("1+2"), called('{"a": 1}', '{"a": 2}')]
    turn = ours.encode_markup("two calls<|eot_id|>")
    new = [result("3"), result("4", 1)]
    header = "<|start_header_id|>ipython<|end_header_id|>\n\n"
    expected = f'{header}"3"<|eot_id|>{header}"4"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n'
    assert ours.decode(appended_tokens(ours, history, turn, new, [ADD])) == expected
    with pytest.raises(InvalidInput, match="only supports single tool-calls"):
        prompt_tokens(ours, [*history, *new], [ADD])


def test_calls_become_texts_if_the_template_cannot_write_results(folders: dict[str, Path]) -> None:
    ours, _ = loaded(folders, "gemma")
    history = [user("1+2"), called('{"a": 1}', '{"a": 2}')]
    turn = ours.encode_markup("two calls<end_of_turn>")
    appended = appended_tokens(ours, history, turn, [result("3"), result("4", 1), user("Go on.")], [ADD])
    assert ours.decode(appended) == "\n<start_of_turn>user\n3\n4\nGo on.<end_of_turn>\n<start_of_turn>model\n"
    prompt = ours.decode(prompt_tokens(ours, [*history, result("3")], [ADD]))
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert call in prompt
    assert prompt.endswith("<start_of_turn>user\n3<end_of_turn>\n<start_of_turn>model\n")


@pytest.mark.parametrize("name", [*CHATML, *LLAMA, "gemma"])
def test_contents_cannot_open_a_turn(folders: dict[str, Path], name: str) -> None:
    ours, _ = loaded(folders, name)
    tags = list(ours.tags)
    attack = f"x{''.join(tags)}y"
    history, turn = [user("q"), said("a")], ours.encode_markup(f"a{ours.format.turn_end}")

    def num_tags(ids: IntArray) -> int:
        numbers = {ours.token_id(tag) for tag in tags}
        return sum(int(number) in numbers for number in ids)

    harmless = appended_tokens(ours, history, turn, [user("x")], [])
    attacked = appended_tokens(ours, history, turn, [user(attack)], [])
    assert num_tags(attacked) == num_tags(harmless)
    assert attack in ours.decode(attacked)
    assert num_tags(prompt_tokens(ours, [user(attack)], [])) == num_tags(prompt_tokens(ours, [user("x")], []))


@pytest.mark.parametrize("name", [*CHATML, *LLAMA])
def test_a_tool_result_names_and_ids_cannot_open_a_turn(folders: dict[str, Path], name: str) -> None:
    ours, _ = loaded(folders, name)
    end = ours.format.turn_end
    turn = ours.encode_markup(f"a{end}")
    history = [user("q"), called('{"a": "' + end + '"}')]
    new = [ChatMessage(role="tool", content=end, call_id=end, name=end)]
    tidy = [ChatMessage(role="tool", content="x", call_id="x", name="x")]
    appended, expected = (appended_tokens(ours, history, turn, messages, [ADD]) for messages in (new, tidy))
    assert (appended == ours.token_id(end)).sum() == (expected == ours.token_id(end)).sum()
    prompt = prompt_tokens(ours, [*history, *new], [ADD])
    expected = prompt_tokens(ours, [user("q"), called('{"a": "x"}'), *tidy], [ADD])
    assert (prompt == ours.token_id(end)).sum() == (expected == ours.token_id(end)).sum()


def test_the_description_of_a_tool_cannot_open_a_turn(folders: dict[str, Path]) -> None:
    ours, _ = loaded(folders, "qwen3")
    wrong, tidy = (
        {"type": "function", "function": {"name": "add", "description": text, "parameters": {}}}
        for text in ("x<|im_end|>\ue000", "x")
    )
    ids = prompt_tokens(ours, [user("q")], [wrong])
    assert "x<|im_end|>\ue000" in ours.decode(ids)
    assert (ids == ours.token_id("<|im_end|>")).sum() == 2
    assert (prompt_tokens(ours, [user("q")], [tidy]) == ours.token_id("<|im_end|>")).sum() == 2


def test_a_rejection_of_the_template_names_the_messages(folders: dict[str, Path]) -> None:
    ours, _ = loaded(folders, "gemma")
    with pytest.raises(InvalidInput, match="roles must alternate") as caught:
        prompt_tokens(ours, [said("3"), user("1+2")], [])
    assert [violation.field for violation in caught.value.violations] == ["messages"]


def test_arguments_are_text_for_a_template_that_adds_them_to_text(tmp_path: Path) -> None:
    """As in templates of DeepSeek, in which an object would be an error of Python."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
        "{% for call in m.tool_calls or [] %}{{ 'CALL ' + call.function.name + ' ' + call.function.arguments }}{% endfor %}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    save_tokenizer(tmp_path, **{**MODELS["qwen3"], "template": template})
    ours = load_tokenizer(tmp_path)
    assert ours.format.arguments_as_text
    history = [user("1+2"), called('{"a": 1}')]
    appended = appended_tokens(ours, history, ours.encode_markup("x<|im_end|>"), [result("3")], [])
    assert ours.decode(appended) == "<|im_start|>tool\n3<|im_end|><|im_start|>assistant\n"
    assert 'CALL add {"a": 1}<|im_end|>' in ours.decode(prompt_tokens(ours, [*history, result("3")], []))


def test_a_turn_that_was_cut_is_ended_first(folders: dict[str, Path]) -> None:
    ours, _ = loaded(folders, "qwen3")
    history = [user("1+2"), said("It is")]
    cut, ended = ours.encode_text("It is"), ours.encode_markup("It is<|im_end|>")
    new = [user("go on")]
    after = appended_tokens(ours, history, ended, new, [])
    assert ours.decode(after) == "\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    assert ours.decode(appended_tokens(ours, history, cut, new, [])) == "<|im_end|>" + ours.decode(after)


def test_another_end_token_stands_for_the_end_of_the_turn(tmp_path: Path) -> None:
    save_chat_tokenizer("chatml", tmp_path)
    ours = load_tokenizer(tmp_path)
    history = [user("1+2"), said("3")]
    turn = ours.encode_markup("3<|endoftext|>")
    assert ends_turn(ours, turn)
    assert not ends_turn(ours, ours.encode_text("3<|im_end|>"))
    assert ours.decode(appended_tokens(ours, history, turn, [user("4")], [])).startswith("\n<|im_start|>user\n4")


def test_the_first_end_after_the_turn_is_its_end(tmp_path: Path) -> None:
    """A template may end turns with calls in another way, as Llama 3 does with `<|eom_id|>`."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
        "{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}"
        "{{ '<|endoftext|>' if m.tool_calls else '<|im_end|>' }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    save_tokenizer(tmp_path, **{**MODELS["qwen3"], "template": template})
    ours = load_tokenizer(tmp_path)
    ends = [ours.token_id("<|im_end|>"), ours.token_id("<|endoftext|>")]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    ours = load_tokenizer(tmp_path)
    history = [user("1+2"), called('{"a": 1}')]
    for end in ("<|endoftext|>", "<|im_end|>"):
        appended = appended_tokens(ours, history, ours.encode_markup(f"x{end}"), [result("3")], [])
        assert ours.decode(appended) == "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"


def test_dropped_reasoning_stays_in_the_recorded_part(folders: dict[str, Path]) -> None:
    """A template that drops earlier reasoning must not change where the appended part begins."""
    ours, _ = loaded(folders, "qwen3")
    history = [user("1+2"), said("<think>\nadd\n</think>\n\n3")]
    turn = ours.encode_markup("<think>\nadd\n</think>\n\n3<|im_end|>")
    expected = "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
    assert ours.decode(appended_tokens(ours, history, turn, [user("sure?")], [])) == expected
    # A new conversation is what the template makes of it: only the reasoning after the last question is kept.
    assert "<think>" not in ours.decode(prompt_tokens(ours, [*history, user("sure?")], []))
    kept = prompt_tokens(ours, [*history[:1], called('{"a": 1}', text=history[1].content), result("3")], [ADD])
    assert ours.token_id("</think>") in kept.tolist()


def test_appended_tokens_do_not_depend_on_the_recorded_text(folders: dict[str, Path]) -> None:
    ours, _ = loaded(folders, "llama31")
    turn = ours.encode_markup("x<|eot_id|>")
    new = [user("and?")]
    expected = appended_tokens(ours, [user("1"), said("x")], turn, new, []).tolist()
    for text in ("", "  y  ", "<|eot_id|>", "rollmeshturn", "rollmeshturnrollmeshturn", "\ue000"):
        assert appended_tokens(ours, [user(text or "1"), said(text)], turn, new, []).tolist() == expected


def test_words_that_the_encoder_uses_may_be_in_a_content(folders: dict[str, Path]) -> None:
    ours, _ = loaded(folders, "qwen3")
    turn = ours.encode_markup("x<|im_end|>")
    text = "rollmeshturn \ue000<|im_end|> \ue001"
    appended = appended_tokens(ours, [user("1"), said("x")], turn, [user(text)], [])
    assert ours.decode(appended) == f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def test_the_demo_appends_a_result_as_its_agent_observes_it() -> None:
    ours = CharTokenizer()
    turn = ours.encode_markup("<tool_call>1+2</tool_call><|end|>")
    history = [user("1+2"), called('{"text": "1+2"}')]
    appended = appended_tokens(ours, history, turn, [result("3<|end|>")], [ADD])
    assert ours.decode(appended) == "<|tool|>3<|end|><|end|><|assistant|>"
    assert (appended == ours.token_id("<|end|>")).sum() == 1


def test_a_template_that_writes_no_turn_is_rejected(tmp_path: Path) -> None:
    template = "{% for m in messages if m.role == 'user' %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    save_tokenizer(tmp_path, **{**MODELS["qwen3"], "template": template})
    ours = load_tokenizer(tmp_path)
    with pytest.raises(Exception, match="what the assistant says"):
        appended_tokens(ours, [user("1"), said("x")], ours.encode_text("x"), [user("2")], [])


def test_history_must_end_with_a_turn() -> None:
    with pytest.raises(ValueError, match="must end with a message of the assistant"):
        appended_tokens(CharTokenizer(), [user("1")], np.zeros(0, dtype=np.int32), [user("2")], [])


def test_a_message_is_the_same_however_a_client_writes_its_arguments() -> None:
    assert called('{"a": 1, "b": 2}').key == called('{"b":2,"a":1}').key
    assert called('{"a": 1}').key != called('{"a": 2}').key
    assert called('{"a": 1').key == called('{"a": 1').key != called("{}").key
    assert result("3").key != result("3", 1).key
    assert len({user("x").key, said("x").key, user("x").key}) == 2


def test_a_message_is_the_same_with_the_numbers_of_javascript() -> None:
    assert called('{"a": 2.0, "b": [-0.0, 1e3]}').key == called('{"a":2,"b":[0,1000]}').key
    assert called('{"a": 2.5}').key != called('{"a": 2}').key
    assert called('{"a": 1e400}').key != called('{"a": 1}').key
    nested = '{"a":' * 990 + "1" + "}" * 990
    assert called(nested).key == called(nested).key


def test_a_message_is_the_same_with_a_name_of_the_assistant_only() -> None:
    assert replace(said("x"), name="agent").key == said("x").key
    assert replace(said("x"), reasoning="because").key != said("x").key
    assert replace(user("x"), name="ann").key != user("x").key


@pytest.mark.parametrize("content", ["  a ", "\n\nuser  b ", ""])
def test_tags_that_strip_the_white_space_at_their_sides(tmp_path: Path, content: str) -> None:
    from transformers import AutoTokenizer

    save_tokenizer(tmp_path, **MODELS["qwen3"])
    file = tmp_path / "tokenizer.json"
    written = json.loads(file.read_text())
    for token in written["added_tokens"]:
        token["rstrip"] = True
        token["lstrip"] = token["content"] == "<|im_end|>"
    file.write_text(json.dumps(written))
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    more = [said(" b "), user(content)]
    expected = theirs(rendered(theirs, [user("a"), *more], []), add_special_tokens=False)["input_ids"]
    assert prompt_tokens(ours, [user("a"), *more], ()).tolist() == expected
    assert grown(ours, theirs, [user("a"), *more], []) == expected
    with_tag = prompt_tokens(ours, [user("a<|im_end|>"), *more], ()).tolist()
    end = ours.token_id("<|im_end|>")
    assert with_tag[with_tag.index(end) :] == expected[expected.index(end) :]


def test_a_text_that_is_much_too_long_is_encoded_only_in_its_beginning(folders: dict[str, Path]) -> None:
    ours, _ = loaded(folders, "qwen3")
    long = [user("word " * 10_000)]
    exact = prompt_tokens(ours, long, ())
    begun = prompt_tokens(ours, long, (), tokens_max=100)
    assert 100 < begun.size < 1000 < exact.size
    assert prompt_tokens(ours, long, (), tokens_max=exact.size).tolist() == exact.tolist()
    short = [user(" assistant" * 500)]
    assert prompt_tokens(ours, short, (), tokens_max=600).tolist() == prompt_tokens(ours, short, ()).tolist()


def test_appended_text_is_not_encoded_as_the_beginning_of_a_text(tmp_path: Path) -> None:
    """Tokenizers in the style of Llama 2 write a space before the first word of a text."""
    from transformers import AutoTokenizer

    save_tokenizer(tmp_path, **MODELS["qwen3"])
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ '[I]' + m.content + '[/I]' if m.role == 'user' else m.content + eos_token }}{% endfor %}"
    )
    file = tmp_path / "tokenizer.json"
    written = json.loads(file.read_text())
    written["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    written["decoder"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    written["model"]["vocab"]["▁"] = max(written["model"]["vocab"].values(), default=0) + 100
    file.write_text(json.dumps(written))
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    messages = [user("a"), said("b"), user("c")]
    expected = theirs(rendered(theirs, messages, []), add_special_tokens=False)["input_ids"]
    after = len(expected) - expected.index(ours.token_id("<|im_end|>"))
    assert grown(ours, theirs, messages, [])[-after:] == expected[-after:]

"""Tool calls in the text of a turn, for all formats: at once, and for every way to cut the text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.services.rollout.chat_format import ChatFormat
from rollmesh.services.rollout.tokenizer import load_tokenizer
from rollmesh.services.rollout.tool_calls.choice import tool_call_parser
from rollmesh.services.rollout.tool_calls.json_calls import read_json
from rollmesh.services.rollout.tool_calls.marked import MarkedStream
from rollmesh.services.rollout.tool_calls.parsing import (
    MalformedCall,
    ParsedCall,
    ParsedTurn,
    ToolCallParser,
    parse_turn,
)
from rollmesh.services.rollout.tool_calls.python_calls import DEPTH_MAX, read_python_calls
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.errors import ConfigError
from rollmesh.testing.rollout import DEMO_FORMAT
from tests.newcomer.chat_models import save_chat_tokenizer
from tests.unit.rollout.chat_tokenizers import MODELS, save_tokenizer


def tool(name: str, **properties: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("add", a="integer", b="integer"), tool("search", query="string")]
HERMES = replace(DEMO_FORMAT, tool_call_body="json")
MISTRAL = replace(HERMES, tool_call_start="[TOOL_CALLS]", tool_call_end="")
LLAMA = replace(HERMES, tool_call_start="", tool_call_end="")
PYTHONIC = replace(LLAMA, tool_call_body="pythonic")
CALL = ParsedCall("add", '{"a": 1, "b": 2}')
HERMES_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
SEARCH = ParsedCall("search", '{"query": "x"}')


def parsed(words: ChatFormat, text: str) -> ParsedTurn:
    """The turn, which must not depend on where the text is cut."""
    parser = tool_call_parser(words)
    turn = parse_turn(parser, text, TOOLS)
    for size in (1, 3):
        assert streamed(parser, [text[at : at + size] for at in range(0, len(text), size)]) == turn
    return turn


def streamed(parser: ToolCallParser, texts: list[str]) -> ParsedTurn:
    stream = parser.stream(TOOLS)
    pieces = [piece for text in texts for piece in stream.feed(text)] + stream.finish()
    assert "" not in pieces
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    return ParsedTurn(content, tuple(piece for piece in pieces if isinstance(piece, ParsedCall)), stream.error)


@pytest.mark.parametrize(
    ("words", "text", "content", "calls"),
    [
        (HERMES, "It is 3.\n ", "It is 3.\n ", []),
        (HERMES, "", "", []),
        (HERMES, HERMES_CALL, "", [CALL]),
        (HERMES, f"I add.\n\n{HERMES_CALL}\n", "I add.", [CALL]),
        (HERMES, f"{HERMES_CALL}\n{HERMES_CALL}", "", [CALL, CALL]),
        (HERMES, f"a {HERMES_CALL} b {HERMES_CALL} c", "a b c", [CALL, CALL]),
        (HERMES, "<think>\nx < y\n</think>\n\n" + HERMES_CALL, "<think>\nx < y\n</think>", [CALL]),
        (HERMES, HERMES_CALL.removesuffix("\n</tool_call>"), "", [CALL]),
        (HERMES, '<tool_call>{"name": "add"}</tool_call>', "", [ParsedCall("add", "{}")]),
        (HERMES, '<tool_call>{"name": "search", "parameters": {"query": "x"}}</tool_call>', "", [SEARCH]),
        (HERMES, '<tool_call>{"name": "search", "arguments": "x"}</tool_call>', "", [SEARCH]),
        (HERMES, '<tool_call>{"name": "search", "arguments": "{\\"query\\": \\"x\\"}"}</tool_call>', "", [SEARCH]),
        (HERMES, '<tool_call>{"name": "rm", "arguments": "x"}</tool_call>', "", [ParsedCall("rm", '{"text": "x"}')]),
        (
            HERMES,
            '<tool_call>{"name": "search", "arguments": {"query": "</tool_call> <tool_call>"}}</tool_call>',
            "",
            [ParsedCall("search", '{"query": "</tool_call> <tool_call>"}')],
        ),
        (MISTRAL, '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "x"}]', "", [CALL]),
        (
            MISTRAL,
            'So: [TOOL_CALLS] [{"name": "search", "arguments": "x"}, {"name": "add", "arguments": {"a": 1, "b": 2}}]',
            "So:",
            [SEARCH, CALL],
        ),
        (LLAMA, ' {"name": "add", "parameters": {"a": 1, "b": 2}}', "", [CALL]),
        (LLAMA, '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}', "", [CALL]),
        (
            LLAMA,
            '{"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": "search", "parameters": {"query": "x"}}',
            "",
            [CALL, SEARCH],
        ),
        (LLAMA, '[{"name": "add", "arguments": {"a": 1, "b": 2}}]', "", [CALL]),
        (LLAMA, "It is 3.", "It is 3.", []),
        (LLAMA, '{"answer": 3}', '{"answer": 3}', []),
        (LLAMA, '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
        (LLAMA, '{"name": "add"} is a call', '{"name": "add"} is a call', []),
        (LLAMA, "[1, 2]", "[1, 2]", []),
        (LLAMA, "[] ", "[] ", []),
        (LLAMA, " \n", " \n", []),
        (PYTHONIC, "[add(a=1, b=2)]", "", [CALL]),
        (PYTHONIC, "<|python_start|>[add(a=1, b=2), search(query='x')]<|python_end|>", "", [CALL, SEARCH]),
        (
            PYTHONIC,
            """[search(query="it's", n=-1.5e2, all=True, none=null, at=[1, (2,), {"a": [false]}],)]""",
            "",
            [
                ParsedCall(
                    "search",
                    '{"query": "it\'s", "n": -150.0, "all": true, "none": null, "at": [1, [2], {"a": [false]}]}',
                )
            ],
        ),
        (PYTHONIC, "[search(query='a\\n\\'b\\u00fc')]", "", [ParsedCall("search", '{"query": "a\\n\'bü"}')]),
        (PYTHONIC, "[1] is the source.", "[1] is the source.", []),
        (PYTHONIC, "[1]", "[1]", []),
        (PYTHONIC, "[open('x')]", "[open('x')]", []),
        (PYTHONIC, "[rm(path='x')]", "[rm(path='x')]", []),
        (PYTHONIC, "The answer is 3.", "The answer is 3.", []),
        (DEMO_FORMAT, "<tool_call>1+2</tool_call>", "", [ParsedCall("add", '{"a": "1+2"}')]),
        (DEMO_FORMAT, "x <tool_call> 1\n</tool_call>", "x", [ParsedCall("add", '{"a": " 1\\n"}')]),
        (DEMO_FORMAT, "<answer>3</answer>", "<answer>3</answer>", []),
        (replace(DEMO_FORMAT, tool_call_start="", tool_call_end="!"), "1+2!", "", [ParsedCall("add", '{"a": "1+2"}')]),
    ],
)
def test_a_turn_is_content_and_calls(words: ChatFormat, text: str, content: str, calls: list[ParsedCall]) -> None:
    assert parsed(words, text) == ParsedTurn(content, tuple(calls))


@pytest.mark.parametrize(
    ("words", "text", "error"),
    [
        (HERMES, "<tool_call>{</tool_call>", "character 1"),
        (HERMES, "<tool_call>[]</tool_call>", "empty list"),
        (HERMES, "<tool_call>3</tool_call>", "no name"),
        (HERMES, '<tool_call>{"name": 3}</tool_call>', "no name"),
        (HERMES, '<tool_call>{"name": ""}</tool_call>', "no name"),
        (HERMES, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "an object or a text, got list"),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN"),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', "JSON can write"),
        (HERMES, '<tool_call>{"name": "\\ud800"}</tool_call>', "JSON can write"),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": "1', "Unterminated"),
        (HERMES, f"<tool_call>{'[' * 20_000}</tool_call>", "cannot be read"),
        (HERMES, f"<tool_call>{'9' * 5_000}</tool_call>", "cannot be read"),
        (MISTRAL, "[TOOL_CALLS] none", "character 0"),
        (LLAMA, '<|python_tag|>search.call(query="x")', ""),
        (LLAMA, '<|python_tag|>{"name": ', "must be JSON"),
        (PYTHONIC, "<|python_start|>[add(1)]<|python_end|>", "a name before '1'"),
        (DEMO_FORMAT, "<tool_call>1+2", "must end with </tool_call>"),
    ],
)
def test_a_malformed_call_stays_in_the_content(words: ChatFormat, text: str, error: str) -> None:
    turn = parse_turn(tool_call_parser(words), text, TOOLS)
    assert (turn.content, turn.calls) == (text, ())
    assert error in turn.error
    assert bool(turn.error) == bool(error)
    assert streamed(tool_call_parser(words), list(text)) == turn


def test_calls_after_a_malformed_one_are_read() -> None:
    assert parsed(HERMES, f"<tool_call>{{</tool_call>{HERMES_CALL}").calls == (CALL,)
    turn = parsed(HERMES, f"<tool_call>oh no {HERMES_CALL}")
    assert (turn.content, turn.calls) == ("<tool_call>oh no", (CALL,))
    turn = parsed(DEMO_FORMAT, "<tool_call>1+<tool_call>1+2</tool_call>")
    assert (turn.content, turn.calls) == ("<tool_call>1+", (ParsedCall("add", '{"a": "1+2"}'),))


def test_half_of_a_character_in_an_argument_is_written_as_an_escape() -> None:
    (call,) = parsed(HERMES, '<tool_call>{"name": "add", "arguments": {"a": "\\ud83d"}}</tool_call>').calls
    assert call.arguments == '{"a": "\\ud83d"}'
    assert call.arguments.encode()


def test_without_tools_all_is_content() -> None:
    assert parse_turn(tool_call_parser(HERMES), HERMES_CALL, []) == ParsedTurn(HERMES_CALL)


def test_content_and_calls_are_returned_as_soon_as_they_are_complete() -> None:
    stream = tool_call_parser(HERMES).stream(TOOLS)
    assert stream.feed("I add") == ["I add"]
    assert stream.feed(" numbers. ") == [" numbers."]
    assert stream.feed("<tool") == []
    assert stream.feed("box>") == [" <toolbox>"]
    assert stream.feed("<tool_call>") == []
    assert stream.feed('{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call') == []
    assert stream.feed("> ") == [CALL]
    assert stream.finish() == []
    stream = tool_call_parser(LLAMA).stream(TOOLS)
    assert stream.feed("<|py") == []
    assert stream.feed("thon") == []
    assert stream.feed(" is") == ["<|python is"]
    assert stream.feed(" {") == [" {"]


_PARTS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<tool", '{"name": "add", "arguments": {"a": 1, "b": 2}}', '"', "{", " ", "\n", "x", "[", "]", "add(", ")", ";"]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(_PARTS, max_size=12),
    words=st.sampled_from([HERMES, MISTRAL, LLAMA, PYTHONIC, DEMO_FORMAT]),
    data=st.data(),
)
def test_any_text_gives_the_same_turn_however_it_is_cut(
    parts: list[str], words: ChatFormat, data: st.DataObject
) -> None:
    text = "".join(parts)
    parser = tool_call_parser(words)
    turn = parse_turn(parser, text, TOOLS)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert streamed(parser, pieces) == turn
    if not turn.calls:
        assert turn.content == text
    for call in turn.calls:
        assert isinstance(json.loads(call.arguments), dict)


# Choice ---------------------------------------------------------------------------------------------------------------


def test_the_parser_is_that_of_the_calls_which_the_chat_template_writes(tmp_path: Path) -> None:
    expected = {"qwen3": "HermesParser", "llama31": "Llama3JsonParser", "pythonic": "LlamaPythonicParser"}
    for name, parser_name in expected.items():
        save_tokenizer(tmp_path / name, **MODELS[name])
        assert type(tool_call_parser(load_tokenizer(tmp_path / name).format)).__name__ == parser_name
    save_chat_tokenizer("mistral", tmp_path / "mistral")
    parser = tool_call_parser(load_tokenizer(tmp_path / "mistral").format)
    assert parse_turn(parser, '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}]', TOOLS).calls == (CALL,)
    assert type(tool_call_parser(DEMO_FORMAT)).__name__ == "BareParser"


@pytest.mark.parametrize("name", ["qwen3", "llama31", "pythonic"])
def test_a_call_that_the_template_writes_is_read_back(tmp_path: Path, name: str) -> None:
    save_tokenizer(tmp_path, **MODELS[name])
    tokenizer = load_tokenizer(tmp_path)
    question = {"role": "user", "content": "q"}
    function = {"name": "add", "arguments": {"a": 1, "b": 2}}
    answer = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    before, text = tokenizer.render([question], TOOLS), tokenizer.render([question, answer], TOOLS)
    turn, _, _ = text.removeprefix(before).partition(tokenizer.format.turn_end)
    assert parsed(tokenizer.format, turn) == ParsedTurn("", (CALL,))


def test_a_configured_parser_replaces_that_of_the_template(tmp_path: Path) -> None:
    parser = tool_call_parser(LLAMA, Extension("hermes"))
    assert parse_turn(parser, HERMES_CALL, TOOLS).calls == (CALL,)
    (tmp_path / "mine.py").write_text(
        "from rollmesh.services.rollout.tool_calls.marked import HermesParser\n"
        "class Mine(HermesParser):\n"
        "    def stream(self, tools):\n"
        "        return super().stream(tools[:1])\n"
    )
    assert parse_turn(tool_call_parser(LLAMA, Extension("mine.py:Mine"), tmp_path), HERMES_CALL, TOOLS).calls == (CALL,)
    with pytest.raises(ConfigError, match="there is no tool call parser `hermse`.*did you mean `hermes`"):
        tool_call_parser(LLAMA, Extension("hermse"))


# Python calls ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[add]",
        "[add(a=1]",
        "[add(a=1)",
        "[add(a=1, a=2)]",
        "[add(a=b)]",
        "[add(a=1+1)]",
        "[add(a=f'{x}')]",
        "[add(a=__import__('os'))]",
        "[add(a=lambda: 1)]",
        "[add(a=0x1)]",
        "[add(a='\\x')]",
        "[add(a={1: 2})]",
        "[add(a={'b' 2})]",
        "[add(a=1 b=2)]",
        "[add(a='x",
        "[add(a=1e999)]",
        f"[add(a={'9' * 5_000})]",
        f"[add(a={'[' * 100_000}",
        f"[add(a={'-' * 100_000}1)]",
    ],
)
def test_other_python_than_calls_with_literals_is_malformed(text: str) -> None:
    with pytest.raises(MalformedCall):
        read_python_calls(text)


def test_values_of_python_calls_nest_up_to_the_limit() -> None:
    def nested(depth: int) -> str:
        return f"[add(a={'[' * depth}{']' * depth})]"

    assert read_python_calls(nested(DEPTH_MAX))
    with pytest.raises(MalformedCall, match=f"at most {DEPTH_MAX} nested"):
        read_python_calls(nested(DEPTH_MAX + 2))


@pytest.mark.parametrize("value", ["</tool_call>" * 50, '", "b": "</tool_call>' * 50, '\\"</tool_call>\\\\' * 50])
@pytest.mark.parametrize("size", [7, 10**6])
def test_a_call_is_not_read_again_for_each_marker_in_its_strings(value: str, size: int) -> None:
    text, num_read = f'{{"a": "{value}"}}</tool_call> end', 0

    def read(body: str) -> list[ParsedCall]:
        nonlocal num_read
        num_read += len(body)
        read_json(body)
        return [ParsedCall("call", body)]

    stream = MarkedStream("<tool_call>", "</tool_call>", read)
    chunks = ["<tool_call>", *(text[at : at + size] for at in range(0, len(text), size))]
    pieces = [piece for chunk in chunks for piece in stream.feed(chunk)] + stream.finish()
    assert pieces[0] == ParsedCall("call", f'{{"a": "{value}"}}')
    assert "".join(piece for piece in pieces if isinstance(piece, str)) == " end"
    assert num_read < 2 * len(text)

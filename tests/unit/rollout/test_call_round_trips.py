"""Templates of many model families: each call that the template writes is read back, or the check reports it.

The markers come from a probe. What the probe itself writes, such as its name or its argument, must not become part of
them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollmesh.services.rollout.chat_format import ChatFormat
from rollmesh.services.rollout.config import FormatConfig
from rollmesh.services.rollout.conversation import ChatMessage, RequestedCall, turn_tokens
from rollmesh.services.rollout.tokenizer import ChatTokenizer, load_tokenizer
from rollmesh.services.rollout.tool_calls.choice import tool_call_parser, why_unread
from rollmesh.services.rollout.tool_calls.marked import READS_MAX, MarkedStream
from rollmesh.services.rollout.tool_calls.parsing import ParsedCall, parse_turn
from rollmesh.services.rollout.tool_calls.xml_calls import Qwen3CoderParser
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.errors import ConfigError
from rollmesh.testing.rollout import DEMO_FORMAT
from tests.unit.rollout.chat_tokenizers import save_all

TURNS = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}CALL{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
WRITTEN = {
    "qwen3_coder": "{{ '<tool_call>\\n<function=' + call.function.name + '>\\n' }}{% for key, value in call.function.arguments.items() %}"
    "{{ '<parameter=' + key + '>\\n' }}{{ value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}"
    "{{ '\\n</parameter>\\n' }}{% endfor %}{{ '</function>\\n</tool_call>' }}",
    "hermes": "{{ '<tool_call>\\n{\"arguments\": ' }}{{ call.function.arguments | tojson }}{{ ', \"name\": \"' + call.function.name + '\"}\\n</tool_call>' }}",
    "spaced": "{{ '<|call|> [{\"name\": \"' + call.function.name + '\", \"parameters\": ' }}{{ call.function.arguments | tojson }}{{ '}] <|/call|>' }}",
    "text_arguments": "{{ '<tool_call>{\"name\": \"' + call.function.name + '\", \"arguments\": ' + call.function.arguments + '}</tool_call>' }}",
    "deepseek": "{{ '<|calls_begin|>' if loop.first else '\\n' }}{{ '<|call_begin|>function<|sep|>' + call.function.name + '\\n```json\\n' }}"
    "{{ call.function.arguments | tojson }}{{ '\\n```<|call_end|>' }}{% if loop.last %}{{ '<|calls_end|>' }}{% endif %}",
    "deepseek_text": "{{ '<|calls_begin|><|call_begin|>' + call.type + '<|sep|>' + call.function.name + '\\n```json\\n' + call.function.arguments }}"
    "{{ '\\n```<|call_end|><|calls_end|>' }}",
    "mistral_args": "{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}{{ call.function.arguments | tojson }}",
    "mistral_id": "{{ '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' }}{{ call.function.arguments | tojson }}",
    "functionary": "{{ '<function=' + call.function.name + '>' }}{{ call.function.arguments | tojson }}{{ '</function>' }}",
    "glm": "{{ '<tool_call>' + call.function.name + '\\n' }}{% for key, value in call.function.arguments.items() %}"
    "{{ '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}{{ value if value is string else value | tojson }}{{ '</arg_value>\\n' }}{% endfor %}"
    "{{ '</tool_call>' }}",
    "named_tag": "{{ '<' + call.function.name + '>' + (call.function.arguments.values() | list | first | string) + '</' + call.function.name + '>' }}",
}
READ = {
    *("chatml", "llama3", "mistral", "gemma", "qwen3", "llama31", "pythonic"),
    *("qwen3_coder", "hermes", "spaced", "text_arguments"),
    *("deepseek", "deepseek_text", "mistral_args", "mistral_id", "functionary", "glm"),
    *("glm45", "deepseek_r1"),
}
"""Families whose calls are read. Of the others, the check tells what the template writes."""
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("stock", {"name": "fig"}),
    ("x", {"q": ""}),
    ("get_weather_2", {"city": 'Zürich "old" town\nnorth', "days": 3, "exact": True}),
    ("plan", {"places": ["Bern", "x, y"], "options": {"a": None, "b": [1.5]}, "text": "{1: [2]}"}),
]
KINDS = {str: "string", bool: "boolean", int: "integer", list: "array", dict: "object"}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTokenizer]:
    root = tmp_path_factory.mktemp("families")
    folders = save_all(root)
    for name, call in WRITTEN.items():
        folders[name] = root / name
        shutil.copytree(folders["qwen3"], folders[name])
        (folders[name] / "chat_template.jinja").write_text(TURNS.replace("CALL", call))
    return {name: load_tokenizer(folder) for name, folder in folders.items()}


def schema(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    properties = {key: {"type": KINDS[type(value)]} for key, value in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters}}


@pytest.mark.parametrize("family", sorted({*READ, *WRITTEN}))
def test_each_call_that_a_template_writes_is_read_back_or_reported(
    tokenizers: dict[str, ChatTokenizer], family: str
) -> None:
    tokenizer = tokenizers[family]
    parser = tool_call_parser(tokenizer.format)
    why = why_unread(tokenizer, parser)
    if family not in READ:
        assert why.startswith("the chat template writes a call as "), why
        return
    assert why == ""
    for name, arguments in CALLS:
        tools = [schema("other", {"z": "1"}), schema(name, arguments)]
        call = RequestedCall(id="rollmesh9", name=name, arguments=json.dumps(arguments))
        asked, turn = ChatMessage(role="user", content="q"), ChatMessage(role="assistant", calls=(call,))
        text = tokenizer.format.without_end(tokenizer.decode(turn_tokens(tokenizer, [asked], turn, tools)))
        read = parse_turn(parser, text, tools)
        assert [(one.name, json.loads(one.arguments)) for one in read.calls] == [(name, arguments)], text
        assert read.error == ""


@pytest.mark.parametrize("family", sorted({*READ, *WRITTEN}))
def test_no_part_of_the_probe_is_in_the_markers(tokenizers: dict[str, ChatTokenizer], family: str) -> None:
    words = tokenizers[family].format
    for marker in (words.tool_call_start, words.tool_call_end):
        assert not any(part in marker for part in ("rollmesh", "other", "text", "words", "arguments", "name")), marker


TOOLS = [schema("add", {"a": 1, "note": "x"})]
SEVERAL = {
    *("qwen3", "pythonic", "qwen3_coder", "hermes"),
    *("deepseek", "deepseek_text", "mistral_args", "mistral_id", "functionary", "glm"),
    *("glm45", "deepseek_r1"),
}


@pytest.mark.parametrize("family", sorted(SEVERAL))
def test_each_of_several_calls_in_a_turn_is_read_back(tokenizers: dict[str, ChatTokenizer], family: str) -> None:
    tokenizer = tokenizers[family]
    tools = [schema(name, arguments) for name, arguments in CALLS]
    calls = tuple(
        RequestedCall(id=f"rollmesh{number}", name=name, arguments=json.dumps(arguments))
        for number, (name, arguments) in enumerate(CALLS)
    )
    asked, turn = ChatMessage(role="user", content="q"), ChatMessage(role="assistant", content="I call.", calls=calls)
    text = tokenizer.format.without_end(tokenizer.decode(turn_tokens(tokenizer, [asked], turn, tools)))
    for pieces in ([text], list(text)):
        stream = tool_call_parser(tokenizer.format).stream(tools)
        found = [part for piece in pieces for part in stream.feed(piece)] + stream.finish()
        read = [(one.name, json.loads(one.arguments)) for one in found if isinstance(one, ParsedCall)]
        assert read == CALLS, text
        assert stream.error == ""


NAMED = replace(DEMO_FORMAT, tool_call_body="named_json", tool_call_start="<|call|>", tool_call_end="<|end|>")
DEEPSEEK = replace(NAMED, tool_call_separator="```json", tool_call_end="```<|end|>", tool_call_next="```<|next|>")
MISTRAL = replace(NAMED, tool_call_start="[TOOL_CALLS]", tool_call_end="", tool_call_separator="[CALL_ID]{id}[ARGS]")
TAGGED = replace(DEMO_FORMAT, tool_call_body="arg_tags")


@pytest.mark.parametrize(
    ("words", "text", "content", "arguments"),
    [
        (DEEPSEEK, '<|call|>add\n```json\n{"a": 1}\n```<|end|>', "", {"a": 1}),
        (DEEPSEEK, 'So: <|call|> add ```json {"a": 1}', "So:", {"a": 1}),
        (DEEPSEEK, '<|call|>add```json{"note": "```<|end|>"}```<|end|> done', " done", {"note": "```<|end|>"}),
        (MISTRAL, '[TOOL_CALLS]add[CALL_ID]rollmesh0[ARGS]{"a": 1}', "", {"a": 1}),
        (DEMO_FORMAT, '[TOOL_CALLS]add[ARGS]{"a": 1}', "", {"a": 1}),
        (TAGGED, "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", "", {"a": 1}),
        (TAGGED, "<tool_call>add</tool_call>", "", {}),
        (TAGGED, "<tool_call>add<arg_key>note</arg_key><arg_value>\n </tool_call> </arg_value></tool_call>", "", {"note": "\n </tool_call> "}),
    ],
)  # fmt: skip
def test_a_name_outside_of_the_arguments_is_read(
    words: ChatFormat, text: str, content: str, arguments: dict[str, Any]
) -> None:
    chosen = Extension("named_json") if words is DEMO_FORMAT else None
    for pieces in ([text], list(text)):
        stream = tool_call_parser(words, chosen).stream(TOOLS)
        found = [part for piece in pieces for part in stream.feed(piece)] + stream.finish()
        assert "".join(part for part in found if isinstance(part, str)) == content
        (call,) = (part for part in found if isinstance(part, ParsedCall))
        assert (call.name, json.loads(call.arguments)) == ("add", arguments)


@pytest.mark.parametrize(
    ("words", "text", "error"),
    [
        (DEEPSEEK, "<|call|>add {}```<|end|>", "must have a name before ```json"),
        (DEEPSEEK, "<|call|>I add ```json{}```<|end|>", "must have a name before ```json"),
        (DEEPSEEK, "<|call|>```json{}```<|end|>", "must have a name before ```json"),
        (DEEPSEEK, "<|call|>add```json[1]```<|end|>", "must be a JSON object, got list"),
        (DEEPSEEK, '<|call|>add```json{"a": NaN}```<|end|>', "NaN"),
        (
            DEEPSEEK,
            "<|call|>add```json{a: 1}```<|end|>",
            "the arguments of a tool call must be a JSON object, got JSON",
        ),
        (DEEPSEEK, "<|call|>add```json{} and so on```<|end|>", "must end after its arguments"),
        (DEEPSEEK, "<|call|>add```json" + "[" * 20_000 + "```<|end|>", "cannot be read"),
        (MISTRAL, "[TOOL_CALLS]add[CALL_ID]{}", "must have [ARGS] after its id"),
        (TAGGED, '<tool_call>{"name": "add", "arguments": {}}</tool_call>', "must begin with the name of a tool"),
        (TAGGED, "<tool_call></tool_call>", "must begin with the name of a tool"),
        (TAGGED, "<tool_call>add<arg_key>a</arg_key>1</tool_call>", "must have <arg_value> at this place"),
        (TAGGED, "<tool_call>add<arg_key>a</arg_key><arg_value>1</tool_call>", "must close the parameter a"),
    ],
)
def test_a_malformed_call_with_a_name_stays_in_the_content(words: ChatFormat, text: str, error: str) -> None:
    turn = parse_turn(tool_call_parser(words), text, TOOLS)
    assert (turn.content, turn.calls) == (text, ())
    assert error in turn.error


def test_many_named_calls_are_read_in_linear_time() -> None:
    text = "[TOOL_CALLS]" + "[TOOL_CALLS]".join(['add[ARGS]{"note": "[ARGS]{"}'] * 20_000)
    assert len(parse_turn(tool_call_parser(DEMO_FORMAT, Extension("named_json")), text, TOOLS).calls) == 20_000


QUOTED_IDS = replace(MISTRAL, tool_call_end="<|end|>", tool_call_next="[TOOL_CALLS]")
END = "</tool_call>"


@pytest.mark.parametrize(
    ("words", "part", "begin", "end"),
    [
        (QUOTED_IDS, '[TOOL_CALLS]add[CALL_ID]"[ARGS]{{"note":"<|end|>"}}', "", "<|end|>"),
        (TAGGED, f"<arg_key>k{{}}</arg_key><arg_value>{END}</arg_value>", "<tool_call>add", END),
        (
            replace(DEMO_FORMAT, tool_call_body="xml"),
            f"<parameter=k{{}}>{END}</parameter>",
            "<tool_call><function=add>",
            f"</function>{END}",
        ),
    ],
)
def test_a_call_with_an_end_marker_in_each_of_many_values_is_read_in_linear_time(
    monkeypatch: pytest.MonkeyPatch, words: ChatFormat, part: str, begin: str, end: str
) -> None:
    num_read = 0
    plain = MarkedStream.__init__

    def counting(self: MarkedStream, start: str, end: str, read: Callable[[str], list[ParsedCall]]) -> None:
        def counted(body: str) -> list[ParsedCall]:
            nonlocal num_read
            num_read += len(body)
            return read(body)

        plain(self, start, end, counted)

    monkeypatch.setattr(MarkedStream, "__init__", counting)
    few, many = (begin + "".join(part.format(number) for number in range(num)) + end for num in (20, 1000))
    assert parse_turn(tool_call_parser(words), few, TOOLS).calls
    num_read = 0
    assert "in fewer than 64 of its values" in parse_turn(tool_call_parser(words), many, TOOLS).error
    assert num_read <= READS_MAX * len(many)


def test_a_parser_that_does_not_fit_the_template_is_reported(tokenizers: dict[str, ChatTokenizer]) -> None:
    parser = Qwen3CoderParser(format=tokenizers["hermes"].format)
    assert "from which Qwen3CoderParser reads 0 calls" in why_unread(tokenizers["hermes"], parser)


def test_words_of_the_configuration_describe_calls_to_a_template_that_ignores_tools(tmp_path: Path) -> None:
    folder = save_all(tmp_path)["gemma"]
    for body in ("json", "xml", "pythonic", "named_json", "arg_tags"):
        tokenizer = load_tokenizer(
            folder,
            FormatConfig(
                tool_call_body=body,
                tool_call_separator="[ARGS]",
                tool_call_start="" if body == "pythonic" else None,
                tool_call_end="" if body == "pythonic" else None,
            ),
        )
        assert why_unread(tokenizer, tool_call_parser(tokenizer.format)) == "", body


@pytest.mark.parametrize(
    ("start", "separator", "key"),
    [(None, None, "tool_call_separator"), (None, "", "tool_call_separator"), (None, "{id}[ARGS]", "tool_call_separator"), ("", "[ARGS]", "tool_call_start")],
)  # fmt: skip
def test_words_that_do_not_bound_the_name_of_a_call_are_rejected(
    tmp_path: Path, start: str | None, separator: str | None, key: str
) -> None:
    words = FormatConfig(tool_call_body="named_json", tool_call_start=start, tool_call_separator=separator)
    with pytest.raises(ConfigError, match=f"`rollout.format.{key}`: must .* for the body named_json"):
        _ = load_tokenizer(save_all(tmp_path)["gemma"], words).format


# The tags of Qwen3-Coder ----------------------------------------------------------------------------------------------


def tagged(*parameters: str, name: str = "add") -> str:
    return f"<tool_call>\n<function={name}>\n{''.join(parameters)}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (tagged("<parameter=a>\n1\n</parameter>\n", "<parameter=note>\n12\n</parameter>\n"), {"a": 1, "note": "12"}),
        (tagged("<parameter=note>\n\n a\nb \n\n</parameter>\n"), {"note": "\n a\nb \n"}),
        (tagged("<parameter=note>\nsay </tool_call>\n</parameter>\n"), {"note": "say </tool_call>"}),
        (tagged("<parameter=note>\n{\"x\": 1}\n</parameter>\n"), {"note": '{"x": 1}'}),
        (tagged("<parameter=a>\none\n</parameter>\n"), {"a": "one"}),
        (tagged("<parameter=new>\n1\n</parameter>\n"), {"new": "1"}),
        (tagged("<parameter=a>None</parameter>"), {"a": None}),
        (tagged(), {}),
    ],
)  # fmt: skip
def test_values_of_tags_have_the_types_of_the_schema(text: str, arguments: dict[str, Any]) -> None:
    for pieces in ([text], list(text)):
        stream = Qwen3CoderParser(format=DEMO_FORMAT).stream(TOOLS)
        found = [part for piece in pieces for part in stream.feed(piece)] + stream.finish()
        (call,) = found
        assert isinstance(call, ParsedCall)
        assert (call.name, json.loads(call.arguments)) == ("add", arguments)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (tagged("<parameter=a>\n1\n"), "must close the parameter a"),
        (tagged("<parameter=a>\n1\n</parameter>", "<parameter=a>\n1\n</parameter>"), "got a twice"),
        (tagged("a=1"), "must have <parameter=NAME>"),
        (tagged(name=""), "must have <function=NAME>"),
        ("<tool_call>{}</tool_call>", "must have <function=NAME>"),
        ("<tool_call><function=add></function>more</tool_call>", "got more text after it"),
    ],
)
def test_a_malformed_call_of_tags_stays_in_the_content(text: str, error: str) -> None:
    turn = parse_turn(Qwen3CoderParser(format=DEMO_FORMAT), text, TOOLS)
    assert (turn.content, turn.calls) == (text, ())
    assert error in turn.error


def test_tags_are_read_in_linear_time() -> None:
    text = tagged(*(f"<parameter=k{number}>" for number in range(20_000)))
    assert "must close the parameter" in parse_turn(Qwen3CoderParser(format=DEMO_FORMAT), text, TOOLS).error
    many = tagged(*(f"<parameter=k{number}>\n{number}\n</parameter>\n" for number in range(20_000)))
    assert len(json.loads(parse_turn(Qwen3CoderParser(format=DEMO_FORMAT), many, TOOLS).calls[0].arguments)) == 20_000

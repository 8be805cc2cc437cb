"""Tokenizers in the style of Qwen 3, Llama 3.1, GLM 4.5 and DeepSeek R1, saved as transformers saves them.

The templates are short rewrites with the habits that matter for a growing conversation: results of parallel calls share
one turn, the reasoning of earlier answers is dropped, contents are trimmed, several calls in one turn are rejected, a
turn ends with the tag of the next role, and arguments must be text. As in the models, the tags around calls and
reasoning are tokens that are not special.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.newcomer.chat_models import STYLES, save_chat_tokenizer

QWEN3 = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}# Tools
<tools>
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(query=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.query = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- set content = message.content or '' %}
{%- if message.role == 'assistant' %}
{%- set reasoning = message.reasoning_content or '' %}
{%- if '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.query and reasoning %}{{ '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}{% endif %}
{{- content }}
{%- for call in message.tool_calls or [] %}
{%- if content or not loop.first %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- elif message.role == 'user' or not loop.first %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA31 = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + system + '<|eot_id|>' }}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
{{- message.content | tojson if message.content is iterable else message.content }}{{ '<|eot_id|>' }}
{%- elif message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{ '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if tools and loop.first %}{% for tool in tools %}{{ tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}{% endif %}
{{- message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

PYTHONIC = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) + '<|end_header_id|>\\n\\n' }}
{%- if tools and loop.first %}{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{% endif %}
{%- if message.tool_calls %}{{ '[' }}
{%- for call in message.tool_calls %}{{ call.function.name + '(' }}
{%- for name, value in call.function.arguments.items() %}{{ name + '=' }}{{ value | tojson }}{{ '' if loop.last else ', ' }}{% endfor %}
{{- ')' + ('' if loop.last else ', ') }}{% endfor %}{{ ']' }}
{%- else %}{{ message.content }}{% endif %}{{ '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

GLM45 = """\
[gMASK]<sop>
{%- if tools %}<|system|>
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|user|>
{{ m.content }}
{%- elif m.role == 'assistant' %}<|assistant|>
<think></think>
{%- if m.content and m.content.strip() %}{{ '\\n' + m.content.strip() }}{% endif %}
{%- for tc in m.tool_calls or [] %}{{ '\\n<tool_call>' + tc.function.name }}
{% for k, v in tc.function.arguments.items() %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson if v is not string else v }}</arg_value>
{% endfor %}</tool_call>{% endfor %}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0-1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

DEEPSEEK_R1 = """\
{{ bos_token }}{%- set ns = namespace(is_tool=false, first=true, out_first=true) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{%- set ns.is_tool = false %}{{ '<|User|>' + m.content }}{%- endif %}
{%- if m.role == 'assistant' and m.tool_calls %}{%- set ns.is_tool = false %}
{%- for tool in m.tool_calls %}
{%- if loop.first %}{{ '<|Assistant|>' + (m.content or '') + '<|tool_calls_begin|><|tool_call_begin|>' + tool.type + '<|tool_sep|>' + tool.function.name + '\\n```json\\n' + tool.function.arguments + '\\n```<|tool_call_end|>' }}
{%- else %}{{ '\\n<|tool_call_begin|>' + tool.type + '<|tool_sep|>' + tool.function.name + '\\n```json\\n' + tool.function.arguments + '\\n```<|tool_call_end|>' }}{%- endif %}
{%- endfor %}{{ '<|tool_calls_end|><|end_of_sentence|>' }}
{%- elif m.role == 'assistant' %}
{%- if ns.is_tool %}{{ '<|tool_outputs_end|>' + m.content + '<|end_of_sentence|>' }}{%- set ns.is_tool = false %}
{%- else %}{{ '<|Assistant|>' + m.content + '<|end_of_sentence|>' }}{%- endif %}{%- endif %}
{%- if m.role == 'tool' %}{%- if ns.is_tool %}{{ '\\n<|tool_output_begin|>' + m.content + '<|tool_output_end|>' }}
{%- else %}{{ '<|tool_outputs_begin|><|tool_output_begin|>' + m.content + '<|tool_output_end|>' }}{%- set ns.is_tool = true %}{%- endif %}{%- endif %}
{%- endfor %}{% if ns.is_tool %}{{ '<|tool_outputs_end|>' }}{% endif %}{% if add_generation_prompt and not ns.is_tool %}{{ '<|Assistant|>' }}{% endif %}"""

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
"""A tool."""
_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_HEADERS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)
_QWEN_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"template": QWEN3, "special": _CHATML, "tags": _QWEN_TAGS, "eos": "<|im_end|>"},
    "llama31": {"template": LLAMA31, "special": _HEADERS, "eos": "<|eot_id|>", "bos": "<|begin_of_text|>"},
    "pythonic": {"template": PYTHONIC, "special": _HEADERS, "eos": "<|eot_id|>", "bos": "<|begin_of_text|>"},
    "glm45": {
        "template": GLM45,
        "special": ("<|endoftext|>", "<|user|>", "<|observation|>", "<|assistant|>", "<|system|>", "[gMASK]", "<sop>"),
        "tags": ("<tool_call>", "</tool_call>"),
        "eos": "<|endoftext|>",
        "ends": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    },
    "deepseek_r1": {
        "template": DEEPSEEK_R1,
        "special": ("<|begin|>", "<|end_of_sentence|>", "<|User|>", "<|Assistant|>"),
        "tags": (
            *("<|tool_calls_begin|>", "<|tool_call_begin|>", "<|tool_sep|>", "<|tool_call_end|>", "<|tool_calls_end|>"),
            *("<|tool_outputs_begin|>", "<|tool_output_begin|>", "<|tool_output_end|>", "<|tool_outputs_end|>"),
        ),
        "eos": "<|end_of_sentence|>",
        "bos": "<|begin|>",
    },
}
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen and Llama cut text. White space merges with what follows it, so the cut between a header and a content
matters."""
_WORDS = [
    "user\n\n\nsystem\n\n assistant\n  hello\n\n\n",
    '{"name": "add", "arguments": {"a": 1}}\n\n',
    "the result of the tool is\n\n",
] * 8


def save_tokenizer(
    folder: Path,
    *,
    template: str,
    special: tuple[str, ...],
    eos: str,
    tags: tuple[str, ...] = (),
    bos: str | None = None,
    ends: tuple[str, ...] = (),
) -> None:
    """Train a byte-level tokenizer with merges over white space, and save it with its template. `ends` are all tokens
    that end a sequence."""
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        _WORDS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in tags])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos, bos_token=bos)  # type: ignore[no-untyped-call]
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    if ends:
        number = {"eos_token_id": [core.token_to_id(end) for end in ends]}
        (folder / "generation_config.json").write_text(json.dumps(number))


def save_all(root: Path) -> dict[str, Path]:
    """Save the tokenizers of all styles and models below `root`, and return their folders by name."""
    for name in STYLES:
        save_chat_tokenizer(name, root / name)
    for name, options in MODELS.items():
        save_tokenizer(root / name, **options)
    return {name: root / name for name in (*STYLES, *MODELS)}

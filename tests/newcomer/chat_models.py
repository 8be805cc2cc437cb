"""Small chat models in the style of released ones, created with transformers and tokenizers as a user would.

A style is the special tokens, the eos token and the chat template. The templates are short rewrites, not copies: they
write what those of the released models write around turns, tools and tool results.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

_CHATML = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}You may call these functions:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role != 'system' %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

_LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
{%- set role = 'ipython' if message.role == 'tool' else message.role %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
{%- if tools and loop.first %}Given these functions, answer with JSON {"name": ..., "parameters": ...}:
{% for tool in tools %}{{ tool | tojson(indent=4) }}
{% endfor %}
{%- endif %}
{%- if message.tool_calls %}
{{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
{{- message.tool_calls[0].function.arguments | tojson }}{{- '}' }}
{%- else %}{{- message.content | trim }}{%- endif %}
{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

_MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and loop.last %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id | length != 9 %}{{ raise_exception('a tool call id has nine characters') }}{% endif %}
{{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- elif message.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + ', "id": "' + call.id + '"}' }}
{%- endfor %}
{{- ']' + eos_token }}
{%- elif message.role == 'assistant' %}{{- ' ' + message.content + eos_token }}
{%- else %}{{ raise_exception('only user, assistant and tool roles are supported') }}
{%- endif %}
{%- endfor %}"""

_GEMMA = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role not in ('user', 'assistant') %}{{ raise_exception('role ' + message.role + ' is not supported') }}{% endif %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\\n' + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""


@dataclass(frozen=True)
class Style:
    """The properties of the tokenizers of a family."""

    template: str
    special: tuple[str, ...]
    eos: str
    bos: str | None = None
    eos_more: tuple[str, ...] = ()
    """Further tokens that generation_config.json names as ends."""


STYLES = {
    "chatml": Style(_CHATML, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|im_end|>", eos_more=("<|endoftext|>",)),
    "llama3": Style(
        _LLAMA3,
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        bos="<|begin_of_text|>",
        eos_more=("<|end_of_text|>", "<|eom_id|>"),
    ),
    "mistral": Style(
        _MISTRAL,
        ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        "</s>",
        bos="<s>",
    ),
    "gemma": Style(
        _GEMMA, ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"), "<eos>", bos="<bos>", eos_more=("<end_of_turn>",)
    ),
}  # fmt: skip


def save_chat_tokenizer(name: str, folder: Path, *, words: tuple[str, ...] = ("sort dbca abcd",)) -> int:
    """Train a byte-level tokenizer, save it with its chat template, and return its number of tokens."""
    from transformers import GenerationConfig, PreTrainedTokenizerFast

    style = STYLES[name]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator(words, trainer)
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in style.special])
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core, eos_token=style.eos, bos_token=style.bos
    )
    tokenizer.chat_template = style.template
    tokenizer.save_pretrained(folder)
    ends = [core.token_to_id(token) for token in (style.eos, *style.eos_more)]
    GenerationConfig(eos_token_id=ends).save_pretrained(folder)  # type: ignore[no-untyped-call]
    return int(core.get_vocab_size())


def save_chat_model(name: str, folder: Path, pairs: Sequence[tuple[str, str]], *, steps: int) -> None:
    """A small model of the style's architecture, trained for a moment on question and answer, saved with its tokenizer.

    "chatml" is a Qwen3, "llama3" a Llama with the rotary scaling of Llama 3.1.
    """
    import torch
    from transformers import AutoTokenizer

    size = save_chat_tokenizer(name, folder, words=tuple(f"{question} {answer}" for question, answer in pairs))
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    model = _model(name, size)
    model.generation_config = model.generation_config.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rng = random.Random(0)
    for _ in range(steps):
        ids, labels = _batch(tokenizer, rng.sample(list(pairs), 32))
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)


def _model(name: str, vocab_size: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "intermediate_size": 256,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }
    if name == "llama3":
        scaling = {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        }
        rope = {"rope_type": "llama3", "rope_theta": 500000.0, **scaling}
        return LlamaForCausalLM(LlamaConfig(**shape, rope_parameters=rope))  # type: ignore[no-untyped-call]
    return Qwen3ForCausalLM(Qwen3Config(**shape))  # type: ignore[no-untyped-call]


def _batch(tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> tuple[Any, Any]:
    """Return padded conversations; only the answers with their end of turn are trained."""
    import torch

    rows = []
    for question, answer in pairs:
        turns = [{"role": "user", "content": question}]
        before = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        whole = tokenizer.apply_chat_template([*turns, {"role": "assistant", "content": answer}], return_dict=False)
        rows.append((whole, len(before)))
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [0] * (width - len(row)) for row, _ in rows])
    labels = torch.full_like(ids, -100)
    for number, (row, begin) in enumerate(rows):
        labels[number, begin : len(row)] = torch.tensor(row[begin:])
    return ids, labels

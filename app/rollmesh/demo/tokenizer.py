"""The character tokenizer of the tiny model: one id per printable ASCII character, and one per structural tag.

It is saved as a real `tokenizer.json` with special tokens and a chat template, so engines that load transformers
folders serve it. Structural tags are single tokens. The tokenizer encodes the text `<answer>` as a tag, even in a tool
result, so callers encode untrusted text with `encode_text`.

Invariants: ids are stable, because every checkpoint depends on them. There is no BOS, so the tokens of a conversation
are the concatenation of the tokens of its messages.
"""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD = "<|pad|>"
END = "<|end|>"
UNKNOWN = "<unk>"
SPECIAL_TOKENS = (
    PAD,
    END,
    UNKNOWN,
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<tool_call>",
    "</tool_call>",
    "<answer>",
    "</answer>",
    "<think>",
    "</think>",
)
"""Ids 0, 1, ... in this order."""

VOCAB_SIZE = 112
"""13 tags, newline and 95 printable characters, rounded up to a multiple of 16. The last 3 ids are unused."""

CHAT_TEMPLATE = """\
{%- if tools -%}<|system|>{%- for tool in tools -%}
{{- (tool.function if tool.function is defined else tool).name -}}
{%- if not loop.last -%}{{- ' ' -}}{%- endif -%}
{%- endfor -%}<|end|>{%- endif -%}
{%- for message in messages -%}
{{- '<|' + message.role + '|>' + (message.content or '') -}}
{%- for call in (message.tool_calls or []) -%}
{%- set arguments = (call.function if call.function is defined else call).arguments -%}
{{- '<tool_call>' -}}
{{- arguments if arguments is string else (arguments.values() | list | first) -}}
{{- '</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
"""There is one tool with one argument, so the body of a call is the argument itself. In JSON it would cost 50
tokens."""


def build_tokenizer(*, model_max_length: int = 512) -> PreTrainedTokenizerFast:
    """Return the tokenizer. `model_max_length` is its declared context, in tokens."""
    characters = ["\n", *(chr(code) for code in range(32, 127))]
    vocab = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *characters])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=UNKNOWN))
    # The regex engine is Oniguruma, which rejects `(?s:.)`. `[\s\S]` also matches a newline.
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encode untrusted text, such as the output of a tool. The result contains no special token."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    return ids

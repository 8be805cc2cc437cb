"""Convert text to token ids and back with the model's tokenizer.json and chat template, without transformers or torch.

Only templates produce tags (special tokens): `encode_markup` encodes them, `encode_text` encodes everything as plain
text, so that a tool's output with `<|assistant|>` remains data. Prompts are rendered as by transformers'
`apply_chat_template`, which a test verifies. The messages of a task may therefore contain tags.

The libraries are imported with the first tokenizer, not with this module.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np

from rollmesh.services.rollout.chat_format import ChatFormat, ToolSchema, derive_format, tools_text
from rollmesh.services.rollout.config import FormatConfig
from rollmesh.shared.domain.trajectory import IntArray, Message
from rollmesh.shared.errors import ConfigError, InvalidInput

MARKUP_CACHE_MAX = 256
_TEMPLATE_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors of Python that an expression in a template raises, in addition to those of Jinja."""


_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer(Protocol):
    """The tokenizer methods that an episode uses. Arrays are int32 [n]."""

    @property
    def format(self) -> ChatFormat:
        """The markers of its conversations. Raises `ConfigError` for configured markers that the chat template never
        writes."""
        ...

    def encode_text(self, text: str) -> IntArray:
        """Encode plain text. The result has no special tokens."""
        ...

    def encode_markup(self, text: str) -> IntArray:
        """Encode text whose tags are special tokens."""
        ...

    @property
    def tags(self) -> Mapping[str, bool]:
        """The texts that markup encodes as one token. True for special tokens, such as those that open and end
        turns."""
        ...

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSchema], *, prompt: bool = True) -> str:
        """Render messages, as chat templates expect them, with `prompt` up to the start of the assistant's turn.

        Raise `InvalidInput` as the template.
        """
        ...

    def encode_rendered(self, text: str, guard: str) -> IntArray:
        """Encode a rendered conversation. The character `guard` is removed; a tag that it breaks is encoded as plain
        text."""
        ...

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> IntArray:
        """Encode a conversation up to the start of the assistant's turn. Raise `InvalidInput` if the template rejects
        it."""
        ...

    def decode(self, token_ids: IntArray) -> str:
        """Return the text of tokens, with tags."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of a token, which may be a part of a character. Those of all tokens of a text join to
        its bytes."""
        ...

    @property
    def num_ids(self) -> int:
        """Token ids are in [0, num_ids)."""
        ...

    def token_id(self, token: str) -> int | None:
        """Return the id of the token for exactly this text, or None if the text needs several tokens."""
        ...


class ChatTokenizer:
    """A tokenizer of the `tokenizers` library with a Jinja chat template."""

    def __init__(
        self, core: Any, render: Callable[..., str], *, eos: Sequence[str] = (), words: FormatConfig | None = None
    ) -> None:
        """`eos` are the tokens that end a sequence, `words` the overrides of the template's markers."""
        self._core = core
        added = core.get_added_tokens_decoder().values()
        self._tags = {token.content: bool(token.special) for token in added}
        self._strips = {token.content: (token.lstrip, token.rstrip) for token in added}
        self._tag_tokens_as_special(added)
        self._template = render
        self._eos = tuple(eos)
        self._changes = words or FormatConfig()
        # The markers around observations are few and occur in every turn.
        self._markup = lru_cache(maxsize=MARKUP_CACHE_MAX)(self._encode_shared)

    def _tag_tokens_as_special(self, added: Iterable[Any]) -> None:
        """Make the library treat every tag as special, because it encodes only special ones as plain text on request.

        Models such as Qwen have tags that are not, for example around tool results. Ids and decoded texts stay the
        same.
        """
        for token in added:
            if not token.special:
                token.special = True
                self._core.add_special_tokens([token])

    def encode_text(self, text: str) -> IntArray:
        self._core.encode_special_tokens = True  # in this library: encode special tokens as ordinary text
        try:
            return self._encode(text)
        finally:
            self._core.encode_special_tokens = False

    def encode_markup(self, text: str) -> IntArray:
        return self._markup(text)

    def _encode_shared(self, text: str) -> IntArray:
        ids = self._encode(text)
        ids.setflags(write=False)
        return ids

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> IntArray:
        return self._encode(self.render([{"role": m.role, "content": m.content} for m in messages], tools))

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSchema], *, prompt: bool = True) -> str:
        if not tools or self.format.renders_tools:
            return self._render(messages, tools, prompt)
        return self._with_tools_text(messages, tools_text(tools, self.format), prompt)

    def encode_rendered(self, text: str, guard: str) -> IntArray:
        if guard not in text:
            return self._encode(text)
        parts = self._tag_pattern.split(text)
        for at in range(1, len(parts), 2):  # the library does so for a whole text
            before, after = self._strips[parts[at]]
            parts[at - 1] = parts[at - 1].rstrip() if before else parts[at - 1]
            parts[at + 1] = parts[at + 1].lstrip() if after else parts[at + 1]
        encoded = [self.encode_text(part.replace(guard, "")) for part in parts[::2]]
        found = [np.asarray([self.token_id(tag)], dtype=np.int32) for tag in parts[1::2]]
        return np.concatenate([ids for pair in zip(encoded, found, strict=False) for ids in pair] + [encoded[-1]])

    @property
    def tags(self) -> Mapping[str, bool]:
        return self._tags

    @cached_property
    def _tag_pattern(self) -> re.Pattern[str]:
        return re.compile(f"({'|'.join(map(re.escape, sorted(self.tags, key=len, reverse=True))) or '(?!)'})")

    @cached_property
    def format(self) -> ChatFormat:
        return derive_format(self._changes, self._render, special=list(self.tags), eos=self._eos)

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSchema] | None, prompt: bool) -> str:
        return self._template(messages=messages, tools=tools or None, documents=None, add_generation_prompt=prompt)

    def _with_tools_text(self, messages: Sequence[Mapping[str, Any]], text: str, prompt: bool) -> str:
        """Add `text` to the system message, or to the first message if the template has no system role."""
        first = messages[0]
        if first["role"] == "system":
            return self._render([{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]], None, prompt)
        try:
            return self._render([{"role": "system", "content": text}, *messages], None, prompt)
        except InvalidInput:
            return self._render([{**first, "content": f"{text}\n\n{first['content']}"}, *messages[1:]], None, prompt)

    def decode(self, token_ids: IntArray) -> str:
        text: str = self._core.decode(token_ids.tolist(), skip_special_tokens=False)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        text = self.decode(np.asarray([token_id], dtype=np.int32))
        if "\N{REPLACEMENT CHARACTER}" not in text:
            return text.encode()
        piece: str = self._core.id_to_token(token_id) or ""
        if byte := _BYTE_PIECE.fullmatch(piece):  # byte fallback, as in SentencePiece
            return bytes([int(byte[1], 16)])
        alphabet = _byte_alphabet()
        return bytes(alphabet[char] for char in piece) if alphabet.keys() >= set(piece) else text.encode()

    @cached_property
    def num_ids(self) -> int:
        highest: int = max(self._core.get_vocab(with_added_tokens=True).values())
        return highest + 1

    @cached_property
    def num_plain_ids(self) -> int:
        """Ids of tokens that were not added to the vocabulary are in [0, num_plain_ids)."""
        highest: int = max(self._core.get_vocab(with_added_tokens=False).values(), default=-1)
        return highest + 1

    def token_id(self, token: str) -> int | None:
        found: int | None = self._core.token_to_id(token)
        return found

    def _encode(self, text: str) -> IntArray:
        # Without a beginning-of-sequence token: a template writes its own, and a continuation must not contain one.
        return np.asarray(self._core.encode(text, add_special_tokens=False).ids, dtype=np.int32)


def load_tokenizer(model_dir: str | Path, words: FormatConfig | None = None) -> ChatTokenizer:
    """Load the tokenizer of a model folder, with overrides of its conversation markers.

    Raise `ConfigError` with the name of the missing or invalid file.
    """
    from tokenizers import Tokenizer as Core

    folder = Path(model_dir)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"`model`: {path} does not exist; copy the tokenizer of the model into its folder", key="model", file=path
        )
    try:
        core = Core.from_str(path.read_text(encoding="utf-8"))
    except Exception as err:  # the library raises plain Exception for all read errors
        raise ConfigError(f"{path}: not a tokenizer.json of the tokenizers library: {err}", file=path) from err
    core.no_padding()
    core.no_truncation()
    return ChatTokenizer(core, _renderer(folder), eos=_eos_tokens(folder, core), words=words)


def _eos_tokens(folder: Path, core: Any) -> list[str]:
    """Return the tokens that end a sequence: the tokenizer's, then those of generation_config.json, or else of
    config.json."""
    found = [_token_text(value) for value in [_read_config(folder / "tokenizer_config.json").get("eos_token")] if value]
    for name in ("generation_config.json", "config.json"):
        if ids := eos_ids(folder / name):
            found += [token for token in map(core.id_to_token, ids) if token is not None]
            break
    return [token for token in dict.fromkeys(found) if core.token_to_id(token) is not None]


def eos_ids(path: Path) -> list[int]:
    """Return the ids of the tokens that end a sequence by a configuration of the model; none if the file does not name
    them."""
    ids = _read_config(path).get("eos_token_id") if path.is_file() else None
    return [] if ids is None else ids if isinstance(ids, list) else [ids]


def _renderer(folder: Path) -> Callable[..., str]:
    """Return the chat template as a function, with the environment and variables that transformers passes to
    templates."""
    from jinja2 import TemplateError

    config = _read_config(folder / "tokenizer_config.json")
    source = _template_source(folder, config)
    try:
        template = _environment().from_string(source)
    except TemplateError as err:
        raise ConfigError(f"{folder}: the chat template does not compile: {err}", file=folder) from err
    special = {key: _token_text(value) for key, value in config.items() if key.endswith("_token") and value is not None}

    def render(**variables: Any) -> str:
        try:
            text: str = template.render(**special, **variables)
            return text
        except (TemplateError, *_TEMPLATE_ERRORS) as err:
            raise InvalidInput(f"the chat template in {folder} rejects the conversation: {err}") from err

    return render


def _environment() -> Any:
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        # Jinja's filter escapes for HTML, but models were trained on plain JSON.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise ConfigError(f"{path}: cannot read this tokenizer file: {err}", file=path) from err
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: expected a JSON object", file=path)
    return config


def _template_source(folder: Path, config: dict[str, Any]) -> str:
    """Return the template. transformers >= 4.51 writes it to a separate file, older versions to the config."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    if not isinstance(source, str):
        raise ConfigError(
            f"{folder}: no chat template; expected {path} or `chat_template` in tokenizer_config.json", file=path
        )
    return source


def _token_text(value: Any) -> str:
    return str(value["content"]) if isinstance(value, dict) else str(value)


@cache
def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary means: printable Latin-1 characters are their own
    byte, and the other bytes have the characters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}

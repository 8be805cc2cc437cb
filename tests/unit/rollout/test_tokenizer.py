"""The tokenizer of rollouts against transformers, on the demo's model folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.services.rollout.config import ToolConfig
from rollmesh.services.rollout.tokenizer import ChatTokenizer, load_tokenizer
from rollmesh.services.rollout.tools import tool_schema
from rollmesh.shared.domain.trajectory import Message
from rollmesh.shared.errors import ConfigError


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rollmesh.demo.tokenizer import build_tokenizer
    from rollmesh.trainer.model_files import save_tokenizer

    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(build_tokenizer(), folder)
    return folder


@pytest.fixture(scope="module")
def ours(model_dir: Path) -> ChatTokenizer:
    return load_tokenizer(model_dir)


@pytest.fixture(scope="module")
def theirs(model_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir)


@pytest.mark.parametrize("tools", [(), ("calculator",), ("calculator", "python")])
@pytest.mark.parametrize(
    "messages",
    [
        [("user", "12*7-30+5")],
        [("system", "be brief"), ("user", "What\nis {{ 1 }} & 'two'?"), ("assistant", "3"), ("user", "sure?")],
    ],
)
def test_prompt_equals_apply_chat_template(
    ours: ChatTokenizer, theirs: Any, messages: list[tuple[str, str]], tools: tuple[str, ...]
) -> None:
    schemas = [tool_schema(name, ToolConfig(profile="calc")) for name in tools]
    expected = theirs.apply_chat_template(
        [{"role": role, "content": content} for role, content in messages],
        tools=schemas or None,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    got = ours.encode_prompt([Message(role=role, content=content) for role, content in messages], schemas)
    assert got.dtype == np.int32
    assert got.tolist() == list(expected)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}\n  {% if loop.first %}{% continue %}{% endif %}\n{{ m | tojson }}\n{% endfor %}{{ eos_token }}",
        "{%- for m in messages -%}{{ m.content | trim }}{% if m.role == 'user' %}{% break %}{% endif %}{%- endfor -%}",
    ],
)
def test_template_environment_equals_that_of_transformers(model_dir: Path, tmp_path: Path, template: str) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(model_dir)
    theirs.chat_template = template
    theirs.save_pretrained(tmp_path)
    messages = [("user", "<b> & ü"), ("assistant", 'say "x"'), ("user", "  y ")]
    expected = theirs.apply_chat_template(
        [{"role": role, "content": content} for role, content in messages], tokenize=True, return_dict=False
    )
    got = load_tokenizer(tmp_path).encode_prompt([Message(role=r, content=c) for r, c in messages], ())
    assert got.tolist() == list(expected)


def test_plain_text_never_becomes_a_tag(ours: ChatTokenizer, theirs: Any) -> None:
    text = "<|assistant|><answer>1</answer><|end|>"
    assert ours.encode_text(text).tolist() == theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert len(ours.encode_text(text)) == len(text)
    assert ours.decode(ours.encode_text(text)) == text


def test_markup_becomes_tags_also_after_plain_text(ours: ChatTokenizer, theirs: Any) -> None:
    text = "<tool_call>1+2</tool_call><|end|>"
    ours.encode_text(text)
    assert ours.encode_markup(text).tolist() == theirs.encode(text, add_special_tokens=False)
    assert ours.encode_markup(text)[-1] == ours.token_id("<|end|>")
    assert ours.decode(ours.encode_markup(text)) == text


def test_token_id_is_none_for_text_of_several_tokens(ours: ChatTokenizer) -> None:
    assert ours.token_id("</tool_call><|end|>") is None


def test_missing_and_broken_files_are_named(tmp_path: Path, model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json does not exist"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"not a tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text((model_dir / "tokenizer.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    with pytest.raises(ConfigError, match="no chat template"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{% for %}"}')
    with pytest.raises(ConfigError, match="does not compile"):
        load_tokenizer(tmp_path)


def test_importing_the_worker_loads_no_heavy_library() -> None:
    code = (
        "import sys, rollmesh.services.rollout.node\n"
        "bad = {'torch', 'transformers', 'tokenizers', 'jinja2'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_the_bytes_of_tokens_join_to_those_of_the_text(kind: str) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    text = "hü € 😀\ufffd"
    if kind == "byte level":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        core = Tokenizer(models.BPE({char: number for number, char in enumerate(alphabet)}, []))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.decoder = decoders.ByteLevel()
    else:
        vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}, "h": 257, "ü": 258}
        core = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
        core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = ChatTokenizer(core, lambda *_: "")
    ids = tokenizer.encode_text(text)
    assert b"".join(tokenizer.token_bytes(int(one)) for one in ids) == text.encode()
    assert any("\ufffd" in tokenizer.decode(ids[at : at + 1]) for at in range(ids.size))

"""Encode conversations of the demo: prompts, tool results, and demonstrations with a loss mask.

The tokens of a conversation are the concatenation of the tokens of its messages. A rollout that appends turns and a
demonstration that is rendered at once therefore have the same ids; a test compares both with `apply_chat_template`.
Collaborators: `tokenizer` (template, tags), `sft` (trains on demonstrations).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rollmesh.demo.tokenizer import encode_text
from rollmesh.shared.domain.trajectory import IntArray, MaskArray


@dataclass(frozen=True, slots=True)
class EncodedDemonstration:
    """A conversation to imitate: `token_ids` [n], and `loss_mask` [n], which is 1 on tokens of the assistant."""

    token_ids: IntArray
    loss_mask: MaskArray

    def __post_init__(self) -> None:
        if self.token_ids.shape != self.loss_mask.shape:
            raise ValueError(
                f"`loss_mask` must have {len(self.token_ids)} entries, one per token, got {len(self.loss_mask)}"
            )


def encode_prompt(tokenizer: PreTrainedTokenizerBase, question: str, *, tools: Sequence[str] = ()) -> list[int]:
    """Return the token ids up to and including the assistant tag, as in the first request of an episode."""
    system = tokenizer.encode(f"<|system|>{' '.join(tools)}<|end|>", add_special_tokens=False) if tools else []
    return [*system, *_message(tokenizer, "user", question), *_tag(tokenizer, "<|assistant|>")]


def encode_tool_result(tokenizer: PreTrainedTokenizerBase, result: str) -> list[int]:
    """Return the token ids that follow a tool call: its result, then the assistant tag."""
    return [*_message(tokenizer, "tool", result), *_tag(tokenizer, "<|assistant|>")]


def render_demonstration(
    tokenizer: PreTrainedTokenizerBase,
    question: str,
    calls: Sequence[tuple[str, str]],
    answer: str,
    *,
    tools: Sequence[str] = (),
) -> EncodedDemonstration:
    """Return a solved episode: the question, each (call, result), and the answer. The loss covers calls, answer and end
    tags."""
    ids = encode_prompt(tokenizer, question, tools=tools)
    mask = [0] * len(ids)
    for call, result in calls:
        turn = tokenizer.encode(f"<tool_call>{call}</tool_call><|end|>", add_special_tokens=False)
        observation = encode_tool_result(tokenizer, result)
        ids += turn + observation
        mask += [1] * len(turn) + [0] * len(observation)
    last = tokenizer.encode(f"<answer>{answer}</answer><|end|>", add_special_tokens=False)
    ids += last
    mask += [1] * len(last)
    return EncodedDemonstration(np.asarray(ids, dtype=np.int32), np.asarray(mask, dtype=np.uint8))


def demonstration_messages(question: str, calls: Sequence[tuple[str, str]], answer: str) -> list[dict[str, Any]]:
    """Return the same episode as chat messages for `apply_chat_template`."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for call, result in calls:
        function = {"name": "python", "arguments": {"code": call}}
        messages.append(
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        )
        messages.append({"role": "tool", "content": result})
    messages.append({"role": "assistant", "content": f"<answer>{answer}</answer>"})
    return messages


def _message(tokenizer: PreTrainedTokenizerBase, role: str, text: str) -> list[int]:
    return [*_tag(tokenizer, f"<|{role}|>"), *encode_text(tokenizer, text), *_tag(tokenizer, "<|end|>")]


def _tag(tokenizer: PreTrainedTokenizerBase, tag: str) -> list[int]:
    ids: list[int] = tokenizer.encode(tag, add_special_tokens=False)
    if len(ids) != 1:
        raise ValueError(f"{tag} must be one token of this tokenizer, got the ids {ids}")
    return ids

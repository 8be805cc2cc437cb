"""Read conversations from JSONL, and turn each into a training sample whose assistant turns are trained.

The tokens are those that a rollout of the same conversation has: prompt, turns and tool results are encoded one after
the other by the same code, so that a model that was fine-tuned here meets the same tokens in reinforcement learning. A
turn of the assistant is what the chat template writes between its generation prompt and the end of the turn, which is
trained too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from rollmesh.services.rollout.chat_format import ToolSchema
from rollmesh.services.rollout.conversation import ChatMessage, appended_tokens, prompt_tokens, turn_tokens
from rollmesh.services.rollout.openai.protocol import read_message, read_tool
from rollmesh.services.rollout.tokenizer import Tokenizer
from rollmesh.sft.rated import RatedConfig, chosen_lines
from rollmesh.shared.domain.decoding import UNDECODABLE
from rollmesh.shared.domain.trajectory import (
    FinishReason,
    GroupContext,
    IntArray,
    MemberOutcome,
    Role,
    Sample,
    Segment,
    Source,
    TrainingSample,
)
from rollmesh.shared.errors import InvalidInput, field_error
from rollmesh.trainer.samples import sequence_of
from rollmesh.trainer.sequences import Sequence1D

ERRORS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """A conversation as the trainer takes it: a sample, which is alone in its group."""

    sample: TrainingSample
    num_tokens: int
    num_trained: int

    @property
    def name(self) -> str:
        """File and line."""
        return self.sample.sample.sample_id

    @property
    def sequence(self) -> Sequence1D:
        return sequence_of(self.sample)

    @property
    def group(self) -> GroupContext:
        member = MemberOutcome(sample_id=self.sample.sample.sample_id, rewards=(), end="ready")
        return GroupContext(group=self.sample.group, task=self.sample.task, members=(member,))


def read_chats(path: Path, tokenizer: Tokenizer, rated: RatedConfig | None = None) -> list[EncodedChat]:
    """Return the conversations of a file, with `rated` those that it chooses among rated samples. Raises InvalidInput
    that names the file and the first lines that are wrong."""
    found: list[EncodedChat] = []
    errors: list[str] = []
    try:
        for number, line in _lines(path) if rated is None else chosen_lines(path, rated):
            try:
                found.append(encode_chat(line, tokenizer, name=f"{path.stem}:{number}"))
            except InvalidInput as err:
                errors.append(f"{path}:{number}: {err.message}")
    except OSError as err:
        raise InvalidInput(f"{path}: cannot be read: {err.strerror}; name a JSONL file of conversations") from err
    if errors:
        more = f"\n{len(errors) - ERRORS_SHOWN} more lines are wrong" if len(errors) > ERRORS_SHOWN else ""
        raise InvalidInput("\n".join(errors[:ERRORS_SHOWN]) + more)
    if not found:
        raise InvalidInput(f"{path}: there is no conversation; write one JSON object with `messages` per line")
    return found


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as lines:
        yield from ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def encode_chat(line: bytes, tokenizer: Tokenizer, *, name: str) -> EncodedChat:
    """Return the conversation of one line. Raises InvalidInput that names the field."""
    try:
        value = msgspec.json.decode(line)
    except UNDECODABLE as err:
        raise InvalidInput(f"not JSON: {err}") from err
    given = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(given, list) or not given or not all(isinstance(one, dict) for one in given):
        remedy = 'write an object such as {"messages": [{"role": "user", "content": "..."}, ...]}'
        raise field_error("messages", "be a list of one or more objects", given, remedy)
    weights = [one.get("weight", 1) for one in given]
    for place, (one, weight) in enumerate(zip(given, weights, strict=True)):
        if weight not in (0, 1) or (weight == 0 and one.get("role") != "assistant"):
            must = "be 0 or 1, and 0 in a turn of the assistant only"
            raise field_error(f"messages[{place}].weight", must, weight)
    messages = [
        read_message({key: part for key, part in one.items() if key != "weight"}, f"messages[{place}]")
        for place, one in enumerate(given)
    ]
    _check_call_ids(messages)
    listed = value.get("tools") or []
    if not isinstance(listed, list):
        raise field_error("tools", "be a list of tools", listed)
    tools = [read_tool(tool, f"tools[{place}]") for place, tool in enumerate(listed)]
    turns = [place for place, message in enumerate(messages) if message.role == "assistant"]
    if not any(weights[place] for place in turns):
        raise field_error("messages", "have a turn of the assistant to train on", None, "add one, or remove the line")
    if turns[0] == 0:
        must = "not be assistant, which cannot begin a conversation"
        raise field_error("messages[0].role", must, "assistant", "add a message of the user")
    segments = list(_segments(tokenizer, messages, tools, turns, weights))
    sample = TrainingSample(
        sample=Sample(sample_id=name, leaf=len(segments) - 1),
        segments=tuple(segments),
        group=name,
        task=name,
        staleness=None,
    )
    return EncodedChat(sample, sum(s.num_tokens for s in segments), sum(s.num_trainable for s in segments))


def _check_call_ids(messages: Sequence[ChatMessage]) -> None:
    """Raise InvalidInput for a result of a tool that answers no call of the assistant before it."""
    called: set[str] = set()
    for place, message in enumerate(messages):
        if message.role == "assistant":
            called = {call.id for call in message.calls}
        elif message.role == "tool" and message.call_id not in called:
            known = ", ".join(sorted(called)) or "it has none"
            must = f"be the id of a call in `tool_calls` of the assistant before it ({known})"
            remedy = "write the call as `tool_calls`, or the result in a message of the user"
            raise field_error(f"messages[{place}].tool_call_id", must, message.call_id, remedy)


def _segments(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage],
    tools: Sequence[ToolSchema],
    turns: Sequence[int],
    weights: Sequence[int],
) -> Iterator[Segment]:
    """Yield the segments up to the last turn of the assistant; what follows it has no influence on a trained token."""
    parent = -1
    recorded: IntArray = np.empty(0, np.int32)
    for number, place in enumerate(turns):
        before = turns[number - 1] if number else -1
        history, new = messages[: before + 1], messages[before + 1 : place]
        if number and not new:
            must = "not be assistant after a turn of the assistant"
            raise field_error(f"messages[{place}].role", must, "assistant", "join the two turns")
        context = (
            appended_tokens(tokenizer, history, recorded, new, tools)
            if number
            else prompt_tokens(tokenizer, new, tools)
        )
        yield Segment(parent=parent, role=Role.CONTEXT, source=Source.DATASET, token_ids=context)
        recorded = turn_tokens(tokenizer, messages[:place], messages[place], tools)
        yield Segment(
            parent=parent + 1,
            role=Role.ACTION,
            source=Source.DATASET,
            token_ids=recorded,
            loss_mask=np.ones(len(recorded), np.uint8) if weights[place] else None,
            finish=FinishReason.STOP,
        )
        parent += 2

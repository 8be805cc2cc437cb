"""Continue the conversations of an episode's clients on the recorded tokens, so that no recorded token is encoded
again.

A client sends its whole history with each request. A *prompt* is a history that ends before a turn of the model, and a
*point* is a history that ends with a recorded turn; both hold a branch of the episode's segment tree. A request
continues the longest point that its history begins with, if the tools are the same: only the messages after it are
encoded. A request that repeats a prompt draws another turn from the same branch. Any other history begins a new chain,
which is counted by its cause.

Collaborators: `conversation` (encodes messages), `environment` (records). Without network.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix

import msgspec
import numpy as np

from rollmesh.services.rollout.agent_types import Turn
from rollmesh.services.rollout.chat_format import ToolSchema
from rollmesh.services.rollout.conversation import ChatMessage, appended_tokens, prompt_tokens, raw_tokens
from rollmesh.services.rollout.environment import Environment
from rollmesh.services.rollout.metrics import OPENAI_CHAINS, OPENAI_REENCODED
from rollmesh.services.rollout.openai.protocol import SamplingRequest
from rollmesh.services.rollout.tokenizer import Tokenizer
from rollmesh.shared.domain.trajectory import IntArray, Message, Role, Segment, Source
from rollmesh.shared.errors import ContextLengthExceeded, Phrase, field_error
from rollmesh.shared.telemetry.metrics import count


@dataclass(slots=True, eq=False)
class ChainPoint:
    """A history that ends with a recorded turn."""

    env: Environment
    """The branch after the turn. It does not change."""
    last_turn: IntArray
    text: str = ""
    """Prompt and turn of a completion as the client knows them; empty for a chat, and if the prompt is token ids."""
    cut: str = ""
    """What ended the turn, and is not in the text that the client got: the end of a turn, or a stop string."""
    continued: bool = False
    """Whether a later turn has it on its path."""


@dataclass(slots=True, eq=False)
class ChainPrompt:
    """A history that ends before a turn of the model."""

    env: Environment
    """The branch before the turn. It does not change."""
    digest: bytes
    num_tokens: int
    after: ChainPoint | None = None
    """The point that it continues."""
    text: str = ""
    """The prompt of a completion as the client knows it; empty for a chat."""
    num_turns: int = 0
    """Number of turns begun here."""
    continued: bool = False
    """Whether it has a recorded turn."""


@dataclass(slots=True)
class ChainCounts:
    """What the clients of one episode asked for."""

    chains: Counter[str] = field(default_factory=Counter)
    """Chains by their cause: first, other, history, tools."""
    continued: int = 0
    """Requests that continued a point or repeated a prompt."""
    forks: int = 0
    """Turns after a point or a prompt that another turn already continues."""
    reencoded_tokens: int = 0
    """Prompt tokens of new chains that contain turns of the model. Continued chains encode none of their recorded
    tokens."""


class Chains:
    """The conversations of one episode."""

    def __init__(self, env: Environment, tokenizer: Tokenizer, context_tokens_max: int) -> None:
        """`env` is the branch with the conversation of the task. A request with the same tokens continues it."""
        self._root = env.branch()
        self._tokenizer = tokenizer
        self._context_tokens_max = context_tokens_max
        self._prompts: dict[bytes, ChainPrompt] = {}
        self._points: dict[bytes, ChainPoint] = {}
        self._known: set[bytes] = set()
        """Digests of histories that end with a recorded turn, without their tools."""
        self._completed: list[ChainPoint] = []
        self._turns: list[tuple[Environment, Environment]] = []
        """The branches before and after each turn, also of one that is not finished."""
        self.points: list[ChainPoint] = []
        self.counts = ChainCounts()

    # Chat -------------------------------------------------------------------------------------------------------------

    def prompt(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema]) -> ChainPrompt:
        """Return the branch on which the request is answered. Raise `InvalidInput` if the messages cannot be encoded or
        are too long."""
        digests = _digests(messages, tools)
        known = self._prompts.get(digests[-1])
        if known is not None:
            self.counts.continued += 1
            return known
        for size in range(len(messages), 0, -1):
            point = self._points.get(digests[size - 1])
            if point is not None:
                prompt = self._continue(point, messages[:size], messages[size:], tools, digests[-1])
                break
        else:
            token_ids = prompt_tokens(self._tokenizer, messages, tools, tokens_max=self._context_tokens_max)
            recorded = any(message.role == "assistant" for message in messages)
            prompt = self._begin(token_ids, _text_view(messages), digests[-1], self._why(messages), recorded)
        self._prompts[digests[-1]] = prompt
        return prompt

    def answered(
        self, prompt: ChainPrompt, env: Environment, turn: Turn, reply: ChatMessage, messages: Sequence[ChatMessage]
    ) -> None:
        """Record what the client was answered to `messages`, so that it can continue from there."""
        point = self._add(prompt, ChainPoint(env, turn.token_ids))
        self._points[_next_digest(prompt.digest, reply)] = point
        self._known.add(_digests([*messages, reply], ())[-1])

    # Completions ------------------------------------------------------------------------------------------------------

    def raw_prompt(self, prompt: str | Sequence[int]) -> ChainPrompt:
        """Return the branch for a prompt without a chat template: a text whose tags are special tokens, or token
        ids."""
        kind = prompt.encode() if isinstance(prompt, str) else np.asarray(prompt, dtype=np.int32).tobytes()
        digest = hashlib.sha256((b"text" if isinstance(prompt, str) else b"ids") + kind).digest()
        known = self._prompts.get(digest)
        if known is not None:
            self.counts.continued += 1
            return known
        point, rest, recorded = self._completion_before(prompt)
        self._check_length(rest.size + (point.env.token_ids.size if point else 0), "prompt")
        view = [Message(role="user", content=self._tokenizer.decode(rest))]
        if point is not None:
            made = self._append(point, rest, view, Source.PROMPT, digest)
        else:
            made = self._begin(rest, view, digest, self._why(()), recorded)
        made.text = prompt if isinstance(prompt, str) else ""
        self._prompts[digest] = made
        return made

    def completed(self, prompt: ChainPrompt, env: Environment, turn: Turn, text: str) -> None:
        """Record a completion with the text that the client got."""
        known = prompt.text and prompt.text + text
        point = ChainPoint(env, turn.token_ids, known, cut=turn.text.removeprefix(text))
        self._completed.append(self._add(prompt, point))

    def _completion_before(self, prompt: str | Sequence[int]) -> tuple[ChainPoint | None, IntArray, bool]:
        """Return the longest completion that the prompt continues, the tokens after it, and whether they contain a
        completion.

        A client may repeat what ended the turn. If it repeats only a part, the recorded tokens do not fit.
        """
        if isinstance(prompt, str):
            begun = [point for point in self._completed if point.text and prompt.startswith(point.text)]
            fits = [p for p in begun if commonprefix([prompt[len(p.text) :], p.cut]) in ("", p.cut)]
            last = max(fits, key=lambda point: len(point.text), default=None)
            rest = prompt[len(last.text) :].removeprefix(last.cut) if last else prompt
            token_ids = raw_tokens(self._tokenizer, rest, tokens_max=self._context_tokens_max)
            return last, token_ids, last is None and bool(begun)
        ids = np.asarray(prompt, dtype=np.int32)
        given = [(point, point.env.token_ids) for point in self._completed]
        had = [(p, h.size) for p, h in given if h.size <= ids.size and np.array_equal(ids[: h.size], h)]
        point, size = max(had, key=lambda entry: entry[1], default=(None, 0))
        return point, ids[size:], False

    # Both -------------------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: ChainPrompt,
        sampling: SamplingRequest,
        stop: Sequence[str],
        on_piece: Callable[[Segment], None],
        begin: IntArray | None = None,
    ) -> tuple[Environment, Turn]:
        """Sample a turn after a prompt; return the branch after it. `begin` are the given first tokens of the turn.
        Raise as `Environment.generate`."""
        env = prompt.env.branch()
        self._turns.append((prompt.env, env))
        turn = await env.generate(
            stop=stop,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            on_piece=on_piece,
            begin=begin,
        )
        return env, turn

    def abandon_cancelled(self) -> None:
        """Keep the turns that were cancelled so far from becoming samples."""
        for before, after in self._turns:
            after.abandon_cancelled(before)

    def _add(self, prompt: ChainPrompt, point: ChainPoint) -> ChainPoint:
        after = prompt.after
        self.counts.forks += prompt.continued or (after is not None and after.continued)
        prompt.continued = True
        if after is not None:
            after.continued = True
        self.points.append(point)
        return point

    def _begin(
        self, token_ids: IntArray, view: Sequence[Message], digest: bytes, why: str, recorded: bool
    ) -> ChainPrompt:
        self._check_length(token_ids.size)
        env = self._root.branch()
        if not np.array_equal(token_ids, env.token_ids):
            env.begin(token_ids, view)
        self.counts.chains[why] += 1
        count(OPENAI_CHAINS, why)
        if recorded:
            self.counts.reencoded_tokens += token_ids.size
            count(OPENAI_REENCODED, amount=token_ids.size)
        return ChainPrompt(env, digest, token_ids.size)

    def _continue(
        self,
        point: ChainPoint,
        history: Sequence[ChatMessage],
        new: Sequence[ChatMessage],
        tools: Sequence[ToolSchema],
        digest: bytes,
    ) -> ChainPrompt:
        token_ids = appended_tokens(
            self._tokenizer, history, point.last_turn, new, tools, tokens_max=self._context_tokens_max
        )
        source = Source.TOOL if any(message.role == "tool" for message in new) else Source.PROMPT
        return self._append(point, token_ids, _text_view(new), source, digest)

    def _append(
        self, point: ChainPoint, token_ids: IntArray, view: Sequence[Message], source: Source, digest: bytes
    ) -> ChainPrompt:
        env = point.env.branch()
        size = env.token_ids.size + token_ids.size
        self._check_length(size)
        if token_ids.size:
            env.append(token_ids, role=Role.OBSERVATION, source=source, messages=view)
        self.counts.continued += 1
        return ChainPrompt(env, digest, size, after=point)

    def _check_length(self, num_tokens: int, field: str = "messages") -> None:
        if num_tokens >= self._context_tokens_max:
            must = f"have less than {self._context_tokens_max} tokens, to leave room for a turn"
            got = Phrase(f"at least {num_tokens}")
            remedy = "send fewer, or raise rollout.limits.context_tokens_max"
            raise field_error(field, must, got, remedy, of=ContextLengthExceeded)

    def _why(self, messages: Sequence[ChatMessage]) -> str:
        """Return the cause of a new chain."""
        if not self.counts.chains:
            return "first"
        if not any(message.role == "assistant" for message in messages):
            return "other"
        return "tools" if self._known.intersection(_digests(messages, ())) else "history"


def _text_view(messages: Sequence[ChatMessage]) -> list[Message]:
    return [Message(role=message.role, content=message.content) for message in messages]


def _digests(messages: Sequence[ChatMessage], tools: Sequence[ToolSchema]) -> list[bytes]:
    """Return a digest per beginning of a history: its first message, its first two messages, and so on."""
    digest = hashlib.sha256(msgspec.json.encode(tools, order="sorted")).digest()
    found = []
    for message in messages:
        digest = _next_digest(digest, message)
        found.append(digest)
    return found


def _next_digest(digest: bytes, message: ChatMessage) -> bytes:
    return hashlib.sha256(digest + msgspec.json.encode(message.key)).digest()

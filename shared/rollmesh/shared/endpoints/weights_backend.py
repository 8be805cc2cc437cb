"""Requests to weights on inference nodes: those of a frozen endpoint, or a past step of the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rollmesh.shared.clients.generated import Target
from rollmesh.shared.clients.inference import InferenceRouter
from rollmesh.shared.domain.trajectory import IntArray, Message, SamplingParams
from rollmesh.shared.endpoints.answer import AskedPrompt, ModelReply
from rollmesh.shared.errors import InvalidInput


class TurnMarkers(Protocol):
    """The ends of a turn in a model's chat format."""

    @property
    def turn_ends(self) -> tuple[str, ...]: ...

    def without_end(self, text: str) -> str: ...


class ChatEncoder(Protocol):
    """The methods of a model's tokenizer that a request needs. Arrays are int32 [n]."""

    @property
    def format(self) -> TurnMarkers: ...

    @property
    def tags(self) -> Mapping[str, bool]: ...

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> IntArray: ...

    def decode(self, token_ids: IntArray) -> str: ...

    def token_id(self, token: str) -> int | None: ...


class WeightsBackend:
    """Implements `ModelBackend` for one target."""

    def __init__(self, router: InferenceRouter, encoder: ChatEncoder, target: Target, *, timeout_s: float) -> None:
        """The backend closes `router`."""
        self._timeout_s = timeout_s
        self._router = router
        self._encoder = encoder
        self._target = target

    async def ask(self, asked: AskedPrompt, *, seed: int) -> ModelReply:
        if asked.tools:
            raise InvalidInput(
                "`tools` are not supported by weights on inference nodes; use an endpoint of kind openai"
            )
        words = (*self._encoder.format.turn_ends, *asked.stop)
        tags = {*self._encoder.format.turn_ends, *self._encoder.tags}
        ids = {word: self._encoder.token_id(word) if word in tags else None for word in words}
        params = SamplingParams(
            temperature=asked.temperature,
            top_p=asked.top_p,
            max_tokens=asked.max_tokens,
            stop=tuple(word for word, number in ids.items() if number is None),
            stop_token_ids=tuple(number for number in ids.values() if number is not None),
            seed=seed,
        )
        messages = [Message(role=message.role, content=message.content) for message in asked.messages]
        prompt = self._encoder.encode_prompt(messages, ())
        generated = await self._router.generate(prompt, params, target=self._target, deadline_s=self._timeout_s)
        text = self._encoder.format.without_end(self._encoder.decode(generated.token_ids))
        return ModelReply(
            text=next((text.removesuffix(word) for word in asked.stop if text.endswith(word)), text),
            finish=generated.finish,
            prompt_tokens=int(prompt.size),
            completion_tokens=int(generated.token_ids.size),
            model=next((f"{v.policy}@{v.step}" for s in reversed(generated.segments) if (v := s.version)), ""),
        )

    async def close(self) -> None:
        await self._router.close()

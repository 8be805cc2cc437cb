"""The policy as scorers use it: log-probs of given tokens under the weights that the inference nodes serve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rollmesh.shared.clients.generated import ScoredTokens, Target
from rollmesh.shared.clients.given_tokens import Prompt, exactly, prompt_ids, sequence
from rollmesh.shared.clients.inference import InferenceRouter
from rollmesh.shared.domain.trajectory import IntArray, Message
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import ConfigError


class PromptEncoder(Protocol):
    """The methods of the model's tokenizer that a scorer may use. Arrays are int32 [n]."""

    def encode_text(self, text: str) -> IntArray: ...

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, object]]) -> IntArray: ...


class PolicyClient:
    """Implements `scorer.Policy`."""

    def __init__(self, router: InferenceRouter, *, policy: str) -> None:
        self._router = router
        self._policy = policy
        self.encoder: PromptEncoder | None = None
        """Set before the first call if the node has the tokenizer of the model."""

    async def logprobs(
        self,
        token_ids: Sequence[int] | IntArray,
        *,
        under: Prompt,
        step: int | PolicyVersion | None = None,
        outputs: Sequence[str] = (),
    ) -> ScoredTokens:
        (scored,) = await self.logprobs_of([(under, token_ids)], step=step, outputs=outputs)
        return scored

    async def logprobs_of(
        self,
        pairs: Sequence[tuple[Prompt, Sequence[int] | IntArray]],
        *,
        step: int | PolicyVersion | None = None,
        outputs: Sequence[str] = (),
    ) -> list[ScoredTokens]:
        prompts = [prompt_ids(prompt, self._encoded) for prompt, _ in pairs]
        sequences = [sequence(prompt, given) for prompt, (_, given) in zip(prompts, pairs, strict=True)]
        found = await self._router.score(sequences, target=exactly(Target(policy=self._policy), step), outputs=outputs)
        return [scored.after(prompt.size) for prompt, scored in zip(prompts, found, strict=True)]

    def encode(self, text: str) -> IntArray:
        return self._tokenizer().encode_text(text)

    def _encoded(self, messages: Sequence[Message]) -> IntArray:
        return self._tokenizer().encode_prompt(messages, ())

    def _tokenizer(self) -> PromptEncoder:
        if self.encoder is None:
            raise ConfigError(
                "the reward node has no tokenizer, because the configuration names neither `model` nor "
                "`rollout.model_dir`; give token ids instead of text"
            )
        return self.encoder

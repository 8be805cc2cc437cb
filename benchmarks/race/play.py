"""Play episodes of the calculator task with `generate` of transformers: the rollouts of TRL, and the evaluator of all
arms of the race.

All episodes advance turn by turn as one batch, and each turn prefills the whole conversation, as the tool loop of TRL's
trainer does. The calculator is called in the same process.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from rollmesh.demo.chat import encode_prompt, encode_tool_result
from rollmesh.sandbox_runtime.tools import calc

_ANSWER = re.compile("<answer>(.*?)</answer>", re.DOTALL)


class RaceTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task with its answer key."""

    question: str
    answer: str
    tools: tuple[str, ...]


class RaceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of an episode, as in `rollout.limits` and `rollout.sampling`."""

    turns: int
    turn_tokens: int
    episode_tokens: int
    context_tokens: int


@dataclass(slots=True)
class PlayedEpisode:
    """One episode. `mask` is 1 on tokens of the model."""

    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    correct: float = 0.0


class RacePlayer:
    """Plays tasks with a model at temperature 1."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, limits: RaceLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._end, self._call, self._call_end = (
            tokenizer.get_vocab()[tag] for tag in ("<|end|>", "<tool_call>", "</tool_call>")
        )
        self._sampling = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=limits.turn_tokens,
            eos_token_id=self._end,
            pad_token_id=tokenizer.pad_token_id,
        )

    def play(self, model: PreTrainedModel, tasks: Sequence[RaceTask]) -> list[PlayedEpisode]:
        """Play one episode of each task."""
        prompts: dict[str, list[int]] = {}
        for task in tasks:
            if task.question not in prompts:
                prompts[task.question] = encode_prompt(self._tokenizer, task.question, tools=task.tools)
        played = [PlayedEpisode(list(prompts[task.question])) for task in tasks]
        open_ones = list(range(len(tasks)))
        for turn in range(1, self._limits.turns + 1):
            turns = self._generate(model, [played[at] for at in open_ones])
            open_ones = [
                at
                for at, ids in zip(open_ones, turns, strict=True)
                if self._goes_on(played[at], tasks[at], ids, last=turn == self._limits.turns)
            ]
            if not open_ones:
                break
        return played

    def _generate(self, model: PreTrainedModel, episodes: Sequence[PlayedEpisode]) -> list[list[int]]:
        """Return the tokens of the next turn of each episode, with the end token unless a limit ended the turn."""
        contexts = [episode.prompt_ids + episode.completion_ids for episode in episodes]
        width = max(map(len, contexts))
        ids = torch.full((len(contexts), width), self._sampling.pad_token_id)
        mask = torch.zeros_like(ids)
        for row, context in enumerate(contexts):
            ids[row, width - len(context) :] = torch.tensor(context)
            mask[row, width - len(context) :] = 1
        out = model.generate(ids, attention_mask=mask, generation_config=self._sampling)[:, width:].tolist()  # type: ignore[operator]
        turns = []
        for episode, context, row in zip(episodes, contexts, out, strict=True):
            room = min(self._limits.context_tokens - len(context), self._limits.episode_tokens - sum(episode.mask))
            length = row.index(self._end) + 1 if self._end in row else len(row)
            turns.append(row[: max(0, min(length, room))])
        return turns

    def _goes_on(self, episode: PlayedEpisode, task: RaceTask, ids: list[int], *, last: bool) -> bool:
        """Append a turn and the result of its call, and return whether another turn follows. The last turn may be the
        answer."""
        episode.completion_ids += ids
        episode.mask += [1] * len(ids)
        if not ids or ids[-1] != self._end:
            return False
        body = ids[:-1]
        if not body or body[-1] != self._call_end or self._call not in body:
            found = _ANSWER.findall(self._text(body))
            episode.correct = float(bool(found) and found[-1].strip() == task.answer)
            return False
        if last:
            return False
        start = len(body) - body[::-1].index(self._call)
        result = encode_tool_result(self._tokenizer, calc.call(self._text(body[start:-1])))
        if len(episode.prompt_ids) + len(episode.completion_ids) + len(result) >= self._limits.context_tokens:
            return False
        episode.completion_ids += result
        episode.mask += [0] * len(result)
        return True

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids))

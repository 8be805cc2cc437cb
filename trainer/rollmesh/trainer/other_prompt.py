"""A feature: the log-probs of the trained tokens after another prompt than the one that they were sampled after.

The other prompt of a sample is its path without some segments, after an optional prefix. Examples:

    omit_sources: [hint]                            without the hints that the agent appended
    omit_roles: [observation]                       without observations
    omit_roles: [context], prompts: /data/p.jsonl   after the prompt of the task in a file of the data set
    omit_roles: [action, observation]               every turn directly after the first context, as in the first turn of a conversation
    prefix: "Answer briefly.\n"                     after a text

An answer is always whole. If the omission would remove trained tokens, every turn has a sequence: the remaining
segments before it, then all actions of the turn. Otherwise one sequence has all of them.

Limits: the forward is separate, so the feature costs as much as one more forward pass over the batch. With gradient
under `current`, its activations stay in memory until the backward of the micro-batch, which about doubles the memory;
halve `packing.micro_batch_tokens`. A text is encoded as it is, without chat template or special tokens around it, so
markers of roles belong into the text. A sample whose trained tokens would begin the sequence, or whose task is not in
the file, is dropped as NO_OTHER_PROMPT, and a sequence beyond the context of the model as TOO_LONG.
"""  # noqa: E501, W505

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Literal

import msgspec
import numpy as np
from torch import Tensor

from rollmesh.shared.config.settings import NonNegativeInt, Settings
from rollmesh.shared.domain.trajectory import IntArray, Role, Segment, Source, TrainingSample
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.features import Feature, FeatureInputs
from rollmesh.trainer.samples import trained_mask, turn_numbers
from rollmesh.trainer.sequences import Sequence1D

_Role = Literal["context", "observation", "action"]
_Source = Literal["policy", "prompt", "tool", "hint", "summary", "dataset", "replay", "rewritten", "peer", "human"]


class OtherPromptOptions(Settings):
    """Options of `other_prompt_logprob`. At least one must be set, and at most one of the three that make a prefix."""

    omit_roles: tuple[_Role, ...] = ()
    """Roles of the segments to omit: `context`, `observation`, `action`."""
    omit_sources: tuple[_Source, ...] = ()
    """Sources of the segments to omit, such as `hint`, `tool` or `prompt`."""
    prefix: str = ""
    """Text before the other segments, which the tokenizer of the model encodes."""
    prefix_ids: tuple[NonNegativeInt, ...] = ()
    """Token ids before the other segments."""
    prompts: str = ""
    """Absolute path of a JSON Lines file with the prefix of each task: `{"task": ID, "text": TEXT}` or `{"task": ID,
    "token_ids": [...]}`. Samples of other tasks are dropped."""

    def check_fields(self) -> None:
        given = [name for name in ("prefix", "prefix_ids", "prompts") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(
                f"at most one of `prefix`, `prefix_ids` and `prompts` may be set, got {' and '.join(given)}"
            )
        if not given and not self.omit_roles and not self.omit_sources:
            raise ValueError("at least one of the options must be set; without them the prompt is the same")
        if self.prompts and not Path(self.prompts).is_absolute():
            raise ValueError(f"`prompts` must be an absolute path, got {self.prompts!r}")


class OtherPromptLogprob(Feature):
    """The log-prob [m] of the token after the other prompt."""

    Options: ClassVar[type[Settings]] = OtherPromptOptions

    def __init__(self, *, options: OtherPromptOptions) -> None:
        """Read the file of prompts. Raises ConfigError that names the line."""
        self.options = options
        self._prompts = _read_prompts(Path(options.prompts)) if options.prompts else {}
        self._encode: Callable[[str], list[int]] | None = None

    def __call__(self, inputs: FeatureInputs) -> Tensor:
        return inputs.logprobs

    def use_tokenizer(self, encode: Callable[[str], list[int]] | None) -> None:
        texts = any(isinstance(prompt, str) for prompt in self._prompts.values())
        if encode is None and (self.options.prefix or texts):
            raise ConfigError(
                "feature `other_prompt_logprob`: a prefix is text, and the folder of the model has no tokenizer; add "
                "the files of the tokenizer, or give token ids"
            )
        self._encode = None if encode is None else lru_cache(maxsize=4096)(encode)

    def sequences_of(self, sample: TrainingSample) -> Sequence[Sequence1D] | None:
        """Return the sequences of a sample, in the order of its turns."""
        segments, turns = sample.segments, turn_numbers(sample.segments)
        answers = [s.role is Role.ACTION or s.num_trainable > 0 for s in segments]
        omitted = [self._omits(s) for s in segments]
        prefix = self._prefix(sample.task)
        if prefix is None:
            return None
        if not any(o and a for o, a in zip(omitted, answers, strict=True)):
            made = [_joined(prefix, [(s, True) for s, o in zip(segments, omitted, strict=True) if not o])]
        else:
            numbered = list(zip(segments, turns, answers, omitted, strict=True))
            made = [
                _joined(
                    prefix, [(s, t == turn) for s, t, a, o in numbered if t <= turn and (not o or (a and t == turn))]
                )
                for turn in sorted({t for s, t, _, _ in numbered if s.num_trainable})
            ]
        found = [sequence for sequence in made if sequence is not None]
        return found if len(found) == len(made) else None

    def _omits(self, segment: Segment) -> bool:
        roles, sources = self.options.omit_roles, self.options.omit_sources
        return Role(segment.role).name.lower() in roles or Source(segment.source).name.lower() in sources

    def _prefix(self, task: str) -> IntArray | None:
        """Return the token ids before the sample; None if the file does not have the task."""
        prompt: str | tuple[int, ...] | None = self.options.prefix or self.options.prefix_ids
        if self.options.prompts:
            prompt = self._prompts.get(task)
        if isinstance(prompt, str):
            if self._encode is None:
                raise RuntimeError("`use_tokenizer` must be called before the first sample")
            prompt = tuple(self._encode(prompt))
        return None if prompt is None else np.asarray(prompt, dtype=np.int32)


class _PromptLine(msgspec.Struct, forbid_unknown_fields=True):
    """One line of a file of prompts."""

    task: str
    text: str = ""
    token_ids: tuple[int, ...] = ()


def _read_prompts(file: Path) -> dict[str, str | tuple[int, ...]]:
    """Return task -> text or token ids."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError as err:
        raise ConfigError(f"feature `other_prompt_logprob`: `prompts`: the file cannot be read: {err}") from err
    found: dict[str, str | tuple[int, ...]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            read = msgspec.json.decode(line, type=_PromptLine)
            if bool(read.text) == bool(read.token_ids):
                raise ValueError("exactly one of `text` and `token_ids` must be set")
        except ValueError as err:  # msgspec's errors are ValueErrors
            raise ConfigError(f"feature `other_prompt_logprob`: {file}, line {number}: {err}") from err
        found[read.task] = read.text or read.token_ids
    return found


def _joined(prefix: IntArray, parts: Sequence[tuple[Segment, bool]]) -> Sequence1D | None:
    """Return prefix and segments as one sequence. The flag of a segment says whether its trained tokens are targets;
    None if no token is before the first target."""
    ids = np.concatenate([prefix, *(segment.token_ids for segment, _ in parts)])
    masks = [trained_mask(s) if is_target else np.zeros(s.num_tokens, np.uint8) for s, is_target in parts]
    mask = np.concatenate([np.zeros(len(prefix), np.uint8), *masks])
    return None if not len(ids) or mask[0] else Sequence1D(ids, mask)

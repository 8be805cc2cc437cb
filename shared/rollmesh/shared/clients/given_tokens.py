"""A scoring request of a user's agent or scorer: a prompt, the given tokens after it, and the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from msgspec.structs import replace

from rollmesh.shared.clients.generated import Target
from rollmesh.shared.domain.trajectory import IntArray, Message
from rollmesh.shared.domain.versions import PolicyVersion

Prompt = Sequence[Message] | Sequence[int] | IntArray
"""Messages, which the chat template encodes, or token ids [n]."""


def prompt_ids(prompt: Prompt, encode: Callable[[Sequence[Message]], IntArray]) -> IntArray:
    """Return the tokens of a prompt, [n] int32. Raise TypeError for a mixture of messages and ids."""
    messages = [one for one in prompt if isinstance(one, Message)]
    if not messages:
        return np.asarray(prompt, dtype=np.int32)
    if len(messages) != len(prompt):
        raise TypeError("`under` must be messages or token ids, got both")
    return encode(messages)


def sequence(prompt: IntArray, token_ids: Sequence[int] | IntArray) -> IntArray:
    """Return the prompt and the tokens after it, [n] int32. Raise ValueError if one of them is not a row of at least
    one token."""
    given = np.asarray(token_ids, dtype=np.int32)
    for name, tokens in (("`token_ids`", given), ("the prompt", prompt)):
        if tokens.ndim != 1 or not tokens.size:
            raise ValueError(f"{name} must be a row of at least one token, got shape {list(tokens.shape)}")
    return np.concatenate([prompt, given])


def exactly(target: Target, step: int | PolicyVersion | None) -> Target:
    """Return `target` at exactly a step of its incarnation, or at a version; unchanged for None."""
    if step is None:
        return target
    if isinstance(step, int):
        return replace(target, step=step, exact=True)
    return replace(target, policy=step.policy, step=step.step, incarnation=step.incarnation, exact=True)

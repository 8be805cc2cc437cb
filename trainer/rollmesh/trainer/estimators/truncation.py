"""Find samples that a limit of tokens ended, and loops at their end. Several estimators treat such samples apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollmesh.shared.domain.trajectory import FinishReason, Role, Segment, TrainingSample

TRUNCATED = "TRUNCATED"
"""Reason of a sample that is not trained because a limit of tokens ended it."""


def is_truncated(sample: TrainingSample) -> bool:
    """Return whether a limit ended the sample: its last turn reached its limit of tokens, or the episode reached one of
    its limits."""
    turn = last_turn(sample)
    return FinishReason.LENGTH in (sample.sample.finish, turn[-1].finish if turn else FinishReason.UNFINISHED)


def last_turn(sample: TrainingSample) -> list[Segment]:
    """Return the segments of the last turn of the model, in order; none if the path does not end with one."""
    turn: list[Segment] = []
    for segment in reversed(sample.segments):
        if segment.role is not Role.ACTION or (turn and segment.finish is not FinishReason.UNFINISHED):
            break
        turn.append(segment)
    return turn[::-1]


def last_loop(sample: TrainingSample, repeats_min: int) -> float:
    """Return the share of the tokens of the last turn that are in a loop at its end; 0 if the path does not end with a
    turn."""
    turn = last_turn(sample)
    return loop_share(np.concatenate([segment.token_ids for segment in turn]).tolist(), repeats_min) if turn else 0.0


def loop_share(tokens: Sequence[int], repeats_min: int) -> float:
    """Return the share of `tokens` [n] in the longest suffix that repeats exactly with one period at least
    `repeats_min` times."""
    matches = prefix_matches(tokens[::-1])
    longest = max((p + matches[p] for p in range(1, len(tokens)) if p + matches[p] >= repeats_min * p), default=0)
    return longest / len(tokens) if tokens else 0.0


def prefix_matches(tokens: Sequence[int]) -> list[int]:
    """Return [n]: at each place, how many tokens from there on equal those from the begin on (the Z-function)."""
    found = [0] * len(tokens)
    left = right = 0  # the match that ends last
    for place in range(1, len(tokens)):
        length = min(found[place - left], right - place) if place < right else 0
        while place + length < len(tokens) and tokens[length] == tokens[place + length]:
            length += 1
        found[place] = length
        if place + length > right:
            left, right = place, place + length
    return found

"""The order of the options of a made multiple-choice task, which its reference determines.

The data service writes the options in this order, and the reward service computes the letter of the answer. So neither
service sends the answer, and the reference contains no part of it. The reference itself is not in the task that an
agent gets.
"""

from __future__ import annotations

import random

NUM_OPTIONS_MAX = 10
"""Greatest number of options: the letters A to J, which the scorer `choice` reads."""
LETTERS = "ABCDEFGHIJ"


def option_order(reference: str, num_options: int) -> tuple[int, ...]:
    """Return a random permutation of 0..n-1 that depends on nothing but the arguments. Position 0 of the options before
    the shuffle is the answer."""
    order = list(range(num_options))
    random.Random(f"options/{reference}/{num_options}").shuffle(order)
    return tuple(order)


def letter_of_answer(reference: str, num_options: int) -> str:
    """Return the letter of the answer of a task with that reference."""
    return LETTERS[option_order(reference, num_options).index(0)]

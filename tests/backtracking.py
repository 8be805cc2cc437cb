"""Find patterns that need more than linear time on some text, without running them.

The tree of a pattern becomes an automaton. A state that a text can loop on in two ways makes the engine try all
combinations. There are three forms (Weideman et al., 2016): a text that leads from a state to itself by two paths
(exponential); a text that loops on a state p, leads from p to another state q, and loops on q (quadratic); and the same
with the implicit loop of a search that starts at every position.

Assertions but a look-behind at the start, back-references and the limits of long counted repeats are ignored, so the
result may be a false alarm, but not the reverse.
"""

from __future__ import annotations

import re
import string
from collections import defaultdict
from collections.abc import Callable, Iterable
from re import _constants as c  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

_ALPHABET = [*map(chr, range(128)), "\u00a0", "\u00e9", "\u0661", "\u4e2d", "\u2028", "\U0001f600"]
_COPIES_MAX = 3
"""Copies of a repeated part. A longer counted repeat is a loop."""
_LOOP_MIN = 64
"""Maximum of a counted repeat from which it counts as a loop: below, the work is a constant factor."""

State = int
Test = Callable[[str], bool]


class Automaton:
    """States with edges that read a character, and with empty edges."""

    def __init__(self, pattern: str, flags: int = 0) -> None:
        tree = _parser.parse(pattern, flags)
        self._flags = tree.state.flags
        self.empty: dict[State, list[State]] = defaultdict(list)
        self.reads: dict[State, list[tuple[frozenset[str], State]]] = defaultdict(list)
        self._size = 0
        self.start = self._new()
        self.not_after = self._not_after(tree)
        """Characters after which no match of a search starts, by a look-behind at the start of the pattern."""
        self.end = self._items(tree, self.start)

    def _not_after(self, tree: Any) -> frozenset[str]:
        if tree and tree[0][0] is c.ASSERT_NOT and tree[0][1][0] < 0 and len(tree[0][1][1]) == 1:
            op, value = tree[0][1][1][0]
            if op in (c.LITERAL, c.IN):
                return self._chars(op, value)
        return frozenset()

    def _new(self) -> State:
        self._size += 1
        return self._size - 1

    def _items(self, items: Iterable[tuple[Any, Any]], state: State) -> State:
        for op, value in items:
            state = self._item(op, value, state)
        return state

    def _item(self, op: Any, value: Any, state: State) -> State:
        if op in (c.LITERAL, c.NOT_LITERAL, c.ANY, c.IN):
            after = self._new()
            self.reads[state].append((self._chars(op, value), after))
            return after
        if op is c.BRANCH:
            after = self._new()
            for branch in value[1]:
                self.empty[self._items(branch, self._from(state))].append(after)
            return after
        if op is c.SUBPATTERN:
            return self._items(value[-1], state)
        if op is c.ATOMIC_GROUP:
            return self._items(value, state)
        if op in (c.MAX_REPEAT, c.MIN_REPEAT, c.POSSESSIVE_REPEAT):
            return self._repeat(value[0], value[1], value[2], state)
        if op is c.GROUPREF_EXISTS:
            return self._item(c.BRANCH, (None, [value[1], value[2] or []]), state)
        assert op in (c.AT, c.ASSERT, c.ASSERT_NOT, c.GROUPREF), op
        return state

    def _from(self, state: State) -> State:
        after = self._new()
        self.empty[state].append(after)
        return after

    def _repeat(self, least: int, most: int, items: Any, state: State) -> State:
        for _ in range(min(least, _COPIES_MAX)):
            state = self._items(items, state)
        if most is c.MAXREPEAT or most >= _LOOP_MIN:
            loop = self._from(state)
            self.empty[self._items(items, loop)].append(loop)
            return self._from(loop)
        after = self._new()
        for _ in range(min(most - least, _COPIES_MAX)):
            self.empty[state].append(after)
            state = self._items(items, self._from(state))
        self.empty[state].append(after)
        return after

    def _chars(self, op: Any, value: Any) -> frozenset[str]:
        if op is c.ANY:
            return frozenset(char for char in _ALPHABET if self._flags & re.DOTALL or char != "\n")
        fold = bool(self._flags & re.IGNORECASE)
        if op is c.IN:
            tests = [_test(*item) for item in value if item[0] is not c.NEGATE]
            negated = value[0][0] is c.NEGATE
        else:
            tests, negated = [_test(c.LITERAL, value)], op is c.NOT_LITERAL
        return frozenset(
            char for char in _ALPHABET if any(test(one) for test in tests for one in _spellings(char, fold)) != negated
        )

    def steps(self) -> dict[State, list[tuple[frozenset[str], State]]]:
        """Return the edges that read a character, from each state that is a target of one or the start, repeated for
        each empty path."""
        found: dict[State, list[tuple[frozenset[str], State]]] = {}
        waiting = [self.start]
        while waiting:
            state = waiting.pop()
            if state not in found:
                found[state] = [edge for near in self.reached(state) for edge in self.reads[near]]
                waiting += [after for _, after in found[state]]
        return found

    def reached(self, state: State) -> list[State]:
        """Return the states over empty edges, once for each path, at most twice. A repeat of a part that may be empty
        gives two paths."""
        paths: list[State] = []
        waiting = [state]
        while waiting:
            here = waiting.pop()
            if paths.count(here) < 2:
                paths.append(here)
                waiting += self.empty[here]
        return paths


def _spellings(char: str, fold: bool) -> set[str]:
    return {char, char.lower(), char.upper()} if fold else {char}


def _test(op: Any, value: Any) -> Test:
    if op is c.LITERAL:
        return lambda char: ord(char) == value
    if op is c.RANGE:
        return lambda char: value[0] <= ord(char) <= value[1]
    assert op is c.CATEGORY, op
    pattern = re.compile("\\" + {"DIGIT": "d", "SPACE": "s", "WORD": "w"}[str(value).rpartition("_")[2]])
    negated = "_NOT_" in str(value)
    return lambda char: (pattern.match(char) is None) == negated


def weakness(pattern: str, flags: int = 0, *, search: bool) -> str:
    """Return why the pattern may need more than linear time, with a text to repeat, or "". `search`: it may match at
    every position."""
    automaton = Automaton(pattern, flags)
    steps = automaton.steps()
    looping = [state for state in steps if state in _after(steps, state)]
    for state in looping:
        if text := _two_ways(steps, state):
            return f"exponential in {text!r}"
    for first in looping:
        for second in looping:
            if first != second and (text := _two_loops(steps, first, second)):
                return f"quadratic in {text!r}"
    if search:
        late = automaton.not_after
        onward = [(frozenset(_ALPHABET) - late, -1), (late, -2)]
        searching = {**steps, -1: [*onward, *steps[automaton.start]], -2: onward}
        for state in looping:
            may_fail = automaton.end not in automaton.reached(state)
            if may_fail and (text := _two_loops(searching, -1, state) or _two_loops(searching, -2, state)):
                return f"quadratic in {text!r} from every start"
    return ""


def _after(steps: dict[State, list[tuple[frozenset[str], State]]], state: State) -> set[State]:
    """Return the states that a non-empty text leads to."""
    found: set[State] = set()
    waiting = [state]
    while waiting:
        for _, after in steps[waiting.pop()]:
            if after not in found:
                found.add(after)
                waiting.append(after)
    return found


def _two_ways(steps: dict[State, list[tuple[frozenset[str], State]]], state: State) -> str:
    """Return a text that leads from the state to itself by two paths, or ""."""
    back = {one for one in steps if state in _after(steps, one)}
    waiting, seen = [(state, state, False, "")], {(state, state, False)}
    while waiting:
        one, other, apart, text = waiting.pop(0)
        for i, (chars, after) in enumerate(steps[one]):
            for j, (more, beside) in enumerate(steps[other]):
                both = chars & more
                if not both or after not in back or beside not in back:
                    continue
                node = (after, beside, apart or after != beside or (one == other and i != j))
                if node == (state, state, True):
                    return text + _shown(both)
                if node not in seen:
                    seen.add(node)
                    waiting.append((*node, text + _shown(both)))
    return ""


def _two_loops(steps: dict[State, list[tuple[frozenset[str], State]]], first: State, second: State) -> str:
    """Return a text that loops on the first state, leads from it to the second, and loops on the second, or ""."""
    if second not in _after(steps, first):
        return ""
    to_first = {one for one in steps if first in _after(steps, one)}
    to_second = {one for one in steps if second in _after(steps, one)}
    start = (first, first, second)
    waiting, seen = [(start, "")], {start}
    while waiting:
        (a, b, d), text = waiting.pop(0)
        for chars, next_a in steps[a]:
            if next_a not in to_first:
                continue
            for more, next_b in steps[b]:
                if next_b not in to_second or not (both := chars & more):
                    continue
                for rest, next_d in steps[d]:
                    if next_d not in to_second or not (all_three := both & rest):
                        continue
                    node = (next_a, next_b, next_d)
                    if node == (first, second, second):
                        return text + _shown(all_three)
                    if node not in seen:
                        seen.add(node)
                        waiting.append((node, text + _shown(all_three)))
    return ""


def _shown(chars: frozenset[str]) -> str:
    return min(chars, key=lambda char: (char not in string.ascii_letters + string.digits, char))

"""A selector: draw the task with the highest observed success rate below 1, and tasks without results first."""

import msgspec

from rollmesh.services.data.selector import Selector


class EasiestFirst(Selector):
    def __init__(self, *, pool, seed):
        self.counts = [[0.0, 0.0] for _ in range(len(pool))]  # successes and failures per position in the pool

    def draw(self, index, in_flight):
        free = [position for position in range(len(self.counts)) if position not in in_flight]
        return max(free or range(len(self.counts)), key=self._priority)

    def _priority(self, position):
        successes, failures = self.counts[position]
        rate = successes / (successes + failures) if successes + failures else 1.5
        return (rate if rate != 1.0 else -1.0, -position)

    def observe(self, result):
        self.counts[result.position][0] += result.successes
        self.counts[result.position][1] += result.failures

    def snapshot(self):
        return msgspec.msgpack.encode(self.counts)

    def restore(self, state):
        self.counts = msgspec.msgpack.decode(state)

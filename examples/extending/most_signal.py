"""A selector: draw the task whose last group had the largest signal, and tasks that were never trained first."""

import msgspec

from rollmesh.services.data.selector import Selector


class MostSignalOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    measure: str = "mean_abs_advantage"


class MostSignal(Selector):
    Options = MostSignalOptions

    def __init__(self, *, pool, seed, options):
        self.measure = options.measure
        self.signal = [None] * len(pool)  # measure of the last trained group, per position in the pool

    def draw(self, index, in_flight):
        free = [position for position in range(len(self.signal)) if position not in in_flight]
        return max(free or range(len(self.signal)), key=self._priority)

    def _priority(self, position):
        signal = self.signal[position]
        return (float("inf") if signal is None else signal, -position)

    def observe(self, result):
        """A group is decided: `result.successes` and `result.failures`. This selector waits for the update."""

    def observe_trained(self, result):
        self.signal[result.position] = result.trained.measures.get(self.measure, 0.0)

    def snapshot(self):
        return msgspec.msgpack.encode(self.signal)

    def restore(self, state):
        self.signal = msgspec.msgpack.decode(state)

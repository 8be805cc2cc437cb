"""A selector: draw uniformly, and plan a larger group, a part of it hotter, for tasks that no answer has solved yet."""

import random

import msgspec

from rollmesh.services.data.selector import Plan, SamplingOverrides, Selector, Variant


class WiderOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    plain: int = 4  # episodes as configured
    hot: int = 4  # episodes at `temperature`
    temperature: float = 1.2


class WiderIfUnsolved(Selector):
    Options = WiderOptions

    def __init__(self, *, pool, seed, options):
        self.seed, self.options = seed, options
        self.solved = [None] * len(pool)  # whether any answer was right, per position in the pool

    def draw(self, index, in_flight):
        return random.Random(f"{self.seed}/{index}").randrange(len(self.solved))

    def plan(self, index, position, in_flight):
        propensity = 1 / len(self.solved)
        if self.solved[position] is not False:
            return Plan(propensity=propensity)  # run.group_size episodes
        hotter = SamplingOverrides(temperature=self.options.temperature)
        variants = (
            Variant(name="plain", count=self.options.plain),
            Variant(name="hot", count=self.options.hot, sampling=hotter),
        )
        return Plan(variants=variants, propensity=propensity)

    def observe(self, result):
        self.solved[result.position] = bool(self.solved[result.position]) or result.successes > 0

    def snapshot(self):
        return msgspec.msgpack.encode(self.solved)

    def restore(self, state):
        self.solved = msgspec.msgpack.decode(state)

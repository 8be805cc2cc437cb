"""A task family: generate words, demonstrate how to reverse them, and resolve the answer."""

from rollmesh.services.data.generated import Demonstration, GeneratedSource
from rollmesh.services.reward.item import AnswerKey
from rollmesh.services.reward.oracles import Oracle


class ReverseSource(GeneratedSource):
    name = "reverse"  # prefix of task ids, and scheme of oracle references
    hardest_level = 8  # a level is the number of syllables

    def make(self, rng, level):
        return "".join(rng.choice("bdfgklmn") + rng.choice("aeiou") for _ in range(level))

    def prompt(self, key):
        return f"Reverse {key}"

    def demonstration(self, key):
        return Demonstration(calls=(), answer=key[::-1])


class ReverseOracle(Oracle):
    """Runs in the reward service only: the answer is in no task, message or log line."""

    def resolve(self, rest):
        return AnswerKey(answers=(rest[::-1],))

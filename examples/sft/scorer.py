"""1 for the sorted letters, else 0."""

from rollmesh.services.reward import scorer
from rollmesh.services.reward.item import ScoreItem


class Scorer(scorer.Scorer):
    async def score(self, item: ScoreItem) -> float:
        return float(item.response().strip() == item.answer_key.answers[0])

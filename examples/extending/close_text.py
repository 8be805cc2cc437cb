"""A scorer: the share of characters that agree with the answer key."""

import msgspec

from rollmesh.services.reward.scorer import Scorer
from rollmesh.shared.domain.trajectory import Reward


class CloseTextOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ignore_case: bool = False


class CloseText(Scorer):
    Options = CloseTextOptions

    def __init__(self, *, options):
        self.ignore_case = options.ignore_case

    async def score(self, item):
        said, key = item.response().strip(), item.answer_key.answers[0]
        if self.ignore_case:
            said, key = said.lower(), key.lower()
        num_equal = sum(a == b for a, b in zip(said, key, strict=False))
        return Reward(name="", value=num_equal / max(len(said), len(key)), evidence=f"{num_equal} characters agree")

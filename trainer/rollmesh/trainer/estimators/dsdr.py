"""GRPO with a bonus for correct samples that differ from the other correct ones (DSDR, 2026-02, arXiv:2602.19895), the
global scale.

Among the correct members of a group, R > threshold, with the texts of their summaries:

    s_i = 1 - mean cosine of the word counts of i and of j              over correct members j of other episodes
    u_i = share of the formulas of i that no such j has                 0 without formulas
    d_i = (1 - formula_share) s_i + formula_share u_i                   in [0, 1]
    R_i <- R_i + bonus min(d_i, diversity_max),   then the advantages of `grpo`

A wrong member gets nothing, so no wrong member can outrank a correct one. The column `diversity_share` gives each token
of a correct sample the softmax of d_i / temperature over the correct members of its group, which sums to 1 over the
group, and 0 to the others. The loss term `dsdr_entropy` distributes the entropy of the local scale by it: more to
samples that are more distinctive.

The text of the paper was not available; its structure is from its abstract and public summaries, and all constants are
ours. Deviations: the paper compares texts by a pretrained encoder; here words are counted, which needs no model. A
formula is a run of words and numbers that are joined by operators, compared without spaces. A correct member without
text, or without another correct one with text, has d = 0. Without any text, it is `grpo`, and the entropy is
distributed equally. Samples of an episode share its weight, and are not compared with each other.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from rollmesh.shared.config.settings import NonNegativeFloat, PositiveFloat, Settings, Share
from rollmesh.shared.domain.trajectory import GroupContext, MemberOutcome
from rollmesh.trainer.estimators.base import Estimate, episode_weights
from rollmesh.trainer.estimators.grpo import Grpo, GrpoOptions

if TYPE_CHECKING:
    from rollmesh.trainer.batch import UpdateBatch

SHARE = "diversity_share"
_WORD = re.compile(r"\w+|[^\w\s]")
_FORMULA = re.compile(r"(?<![\w.])[\w.]+(?:\s?[-+*/^=<>]\s?\(*[\w.]+\)*)+")


class DsdrOptions(GrpoOptions):
    """Settings of the estimator `dsdr`: those of `grpo`, and the diversity of correct samples."""

    threshold: float = 0.5
    """A sample is correct if its weighted reward sum is larger."""
    bonus: NonNegativeFloat = 0.1
    """Reward of the largest diversity."""
    diversity_max: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """Larger diversities get the bonus of this one."""
    formula_share: Share = 0.5
    """Weight of new formulas in the diversity; the rest is that of words."""
    temperature: PositiveFloat = 0.2
    """Temperature of the softmax that distributes the entropy among correct samples. A low one favors the most
    distinctive sample."""


class Dsdr(Grpo):
    """Reward diversity among correct samples, and report their shares of the entropy term."""

    Options: ClassVar[type[Settings]] = DsdrOptions
    columns = (SHARE,)

    def __call__(self, batch: UpdateBatch) -> Estimate:
        options: DsdrOptions = self.options
        scored, found, shares = [], [], dict[str, float]()
        for group in batch.groups:
            members, sums = self.reward_sums(group)
            correct, diversities = self._diversities(members, sums)
            scored.append((members, self._rewarded(sums, correct, diversities)))
            found += diversities.tolist()
            of_group = softmax_shares([members[i] for i in correct], diversities, options.temperature)
            shares |= {members[i].sample_id: s for i, s in zip(correct, of_group.tolist(), strict=True)}
        estimate = self.spread(batch, self.of_sums(scored))
        per_sample = np.array([shares.get(s.sample.sample_id, 0.0) for s in batch.samples], np.float32)
        return Estimate(
            advantages=estimate.advantages,
            dropped=estimate.dropped,
            columns={SHARE: batch.per_token(per_sample)},
            metrics={"diversity_mean": float(np.mean(found)) if found else 0.0, "correct": float(len(found))},
        )

    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Return sample id -> advantage, as in `grpo`."""
        members, sums = self.reward_sums(group)
        return self.of_rewards(members, self._rewarded(sums, *self._diversities(members, sums)))

    def _diversities(
        self, members: Sequence[MemberOutcome], sums: NDArray[np.float64]
    ) -> tuple[list[int], NDArray[np.float64]]:
        """Return the numbers of the correct members, and their diversities."""
        correct = np.flatnonzero(sums > self.options.threshold).tolist()
        return correct, diversities_of([members[i] for i in correct], self.options.formula_share)

    def _rewarded(
        self, sums: NDArray[np.float64], correct: list[int], diversities: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        rewards = sums.copy()
        rewards[correct] += self.options.bonus * np.minimum(diversities, self.options.diversity_max)
        return rewards


def diversities_of(members: Sequence[MemberOutcome], formula_share: float) -> NDArray[np.float64]:
    """Return the diversity [n] of each of the correct members of a group."""
    found = np.zeros(len(members))
    texts = [member.summary.text for member in members]
    episodes = [member.episode or member.sample_id for member in members]
    cosine = word_cosines(texts)
    formulas = [{re.sub(r"\s", "", formula) for formula in _FORMULA.findall(text)} for text in texts]
    for i, text in enumerate(texts):
        others = [j for j, other in enumerate(texts) if other and text and episodes[j] != episodes[i]]
        if not others:
            continue
        similar = float(episode_weights([members[j] for j in others]) @ cosine[i, others])
        known = set().union(*(formulas[j] for j in others))
        new = len(formulas[i] - known) / len(formulas[i]) if formulas[i] else 0.0
        found[i] = (1 - formula_share) * max(0.0, 1.0 - similar) + formula_share * new
    return found


def word_cosines(texts: Sequence[str]) -> NDArray[np.float64]:
    """Return [n, n]: the cosines of the word counts of the texts. Those of a text without words are 0."""
    counts = [Counter(_WORD.findall(text.lower())) for text in texts]
    words = {word: k for k, word in enumerate(dict.fromkeys(word for count in counts for word in count))}
    vectors = np.zeros((len(texts), len(words)))
    for i, count in enumerate(counts):
        for word, number in count.items():
            vectors[i, words[word]] = number
    norms = np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    cosines: NDArray[np.float64] = (vectors / norms) @ (vectors / norms).T
    return cosines


def softmax_shares(
    members: Sequence[MemberOutcome], diversities: NDArray[np.float64], temperature: float
) -> NDArray[np.float64]:
    """Return [n] shares with sum 1, in which every episode counts once."""
    if not members:
        return np.zeros(0)
    shares = episode_weights(members) * np.exp((diversities - diversities.max()) / temperature)
    total: NDArray[np.float64] = shares / shares.sum()
    return total

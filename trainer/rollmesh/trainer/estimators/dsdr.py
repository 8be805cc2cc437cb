"""GRPO with a bonus for correct samples that differ from the other correct ones (DSDR, 2026-02, arXiv:2602.19895), the
global scale.

For a correct member i of a group, R_i > threshold, with the texts of the summaries of all members:

    s_i = mean over the others j of (1 - cos(z_i, z_j)) / 2             z: encoding of the text; of other episodes
    u_i = share of the formulas of i that no such j has                 0 without formulas
    d_i = min((1 - formula_share) s_i + formula_share u_i, diversity_max)
    R_i <- R_i + bonus d_i,   then the advantages of `grpo`

A wrong member gets nothing, so no wrong member can outrank a correct one, and it counts among the others. The column
`diversity_share` gives each token of a correct sample the softmax of d_i / temperature over the correct members of its
group, which sums to 1 over the group, and 0 to the others. The loss term `dsdr_entropy` distributes the entropy of the
local scale by it: more to samples that are more distinctive.

`encoder` names a folder with a sentence encoder; the paper has all-MiniLM-L6-v2, frozen. Its encodings are means of the
last states over the tokens. Without one, z is the counts of words, which needs no model. The reward service has no
torch, so with an encoder it cannot tell which groups have a gradient, and leaves that to the trainer.

Formulas and constants are those of the paper (bonus 0.001, temperature 1/5), except `diversity_max`, which it does not
state: not established; configuration. Its code was not available. Deviations: a formula is a run of words and numbers
that are joined by operators, compared without spaces. A member without text has d = 0, and counts as no other. Without
any text, it is `grpo`, and the entropy is distributed equally. Samples of an episode share its weight, and are not
compared with each other.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from rollmesh.shared.config.settings import NonNegativeFloat, PositiveFloat, PositiveInt, Settings, Share
from rollmesh.shared.domain.trajectory import GroupContext, MemberOutcome
from rollmesh.trainer.estimators.base import UNDECIDED, Estimate, episode_weights
from rollmesh.trainer.estimators.grpo import Grpo, GrpoOptions

if TYPE_CHECKING:  # they import torch
    from rollmesh.trainer.batch import UpdateBatch
    from rollmesh.trainer.sentence_encoder import SentenceEncoder

SHARE = "diversity_share"
_WORD = re.compile(r"\w+|[^\w\s]")
_FORMULA = re.compile(r"(?<![\w.])[\w.]+(?:\s?[-+*/^=<>]\s?\(*[\w.]+\)*)+")


class DsdrOptions(GrpoOptions):
    """Settings of the estimator `dsdr`: those of `grpo`, and the diversity of correct samples."""

    threshold: float = 0.5
    """A sample is correct if its weighted reward sum is larger."""
    bonus: NonNegativeFloat = 0.001
    """Factor of the diversity in the reward."""
    diversity_max: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """Larger diversities count as this one."""
    formula_share: Share = 0.5
    """Weight of new formulas in the diversity; the rest is that of words."""
    temperature: PositiveFloat = 0.2
    """Temperature of the softmax that distributes the entropy among correct samples. A low one favors the most
    distinctive sample. The paper's tau is its inverse."""
    encoder: str = ""
    """Absolute path of a folder with a sentence encoder and its tokenizer in transformers format, such as
    all-MiniLM-L6-v2. Empty: counts of words."""
    encoder_tokens: PositiveInt = 256
    """Tokens of a text that the encoder reads, from its begin."""


class Dsdr(Grpo):
    """Reward diversity among correct samples, and report their shares of the entropy term."""

    Options: ClassVar[type[Settings]] = DsdrOptions
    columns = (SHARE,)

    def __init__(self, *, weights: Mapping[str, float], options: DsdrOptions) -> None:
        super().__init__(weights=weights, options=options)
        self._encoder: SentenceEncoder | None = None

    def __call__(self, batch: UpdateBatch) -> Estimate:
        options: DsdrOptions = self.options
        scored, found, shares = [], [], dict[str, float]()
        for group in batch.groups:
            members, sums = self.reward_sums(group)
            correct, diversities = self._diversities(members, sums, self._cosines(members))
            scored.append((members, self._rewarded(sums, correct, diversities)))
            found += diversities.tolist()
            of_group = softmax_shares([members[i] for i in correct], diversities, options.temperature)
            shares |= {members[i].sample_id: s for i, s in zip(correct, of_group.tolist(), strict=True)}
        estimate = self.spread(batch, self.of_sums(scored, self.given(batch)))
        per_sample = np.array([shares.get(s.sample.sample_id, 0.0) for s in batch.samples], np.float32)
        return Estimate(
            advantages=estimate.advantages,
            dropped=estimate.dropped,
            columns={SHARE: batch.per_token(per_sample)},
            metrics={
                **estimate.metrics,
                "diversity_mean": float(np.mean(found)) if found else 0.0,
                "correct": float(len(found)),
            },
        )

    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Return sample id -> advantage. With an encoder, `UNDECIDED` if the rewards agree and several members with
        text are correct."""
        members, sums = self.reward_sums(group)
        correct = [members[i] for i in np.flatnonzero(sums > self.options.threshold)]
        if self.options.encoder and len(correct) > 1 and any(member.summary.text for member in correct):
            found = self.of_rewards(members, sums)
            return found if any(found.values()) else dict.fromkeys(found, UNDECIDED)
        diverse = self._diversities(members, sums, word_cosines([m.summary.text for m in members]))
        return self.of_rewards(members, self._rewarded(sums, *diverse))

    def _cosines(self, members: Sequence[MemberOutcome]) -> NDArray[np.float64]:
        texts = [member.summary.text for member in members]
        if not self.options.encoder:
            return word_cosines(texts)
        if self._encoder is None:
            from rollmesh.trainer.sentence_encoder import SentenceEncoder  # imports torch

            self._encoder = SentenceEncoder(self.options.encoder, self.options.encoder_tokens)
        vectors = self._encoder.encode(texts)
        cosines: NDArray[np.float64] = vectors @ vectors.T
        return cosines

    def _diversities(
        self, members: Sequence[MemberOutcome], sums: NDArray[np.float64], cosines: NDArray[np.float64]
    ) -> tuple[list[int], NDArray[np.float64]]:
        """Return the numbers of the correct members, and their diversities."""
        correct = np.flatnonzero(sums > self.options.threshold).tolist()
        found = diversities_of(members, cosines, self.options.formula_share)[correct]
        return correct, np.minimum(found, self.options.diversity_max)

    def _rewarded(
        self, sums: NDArray[np.float64], correct: list[int], diversities: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        rewards = sums.copy()
        rewards[correct] += self.options.bonus * diversities
        return rewards


def diversities_of(
    members: Sequence[MemberOutcome], cosines: NDArray[np.float64], formula_share: float
) -> NDArray[np.float64]:
    """Return the diversity [n] of each member of a group, given the cosines [n, n] of their texts."""
    found = np.zeros(len(members))
    texts = [member.summary.text for member in members]
    episodes = [member.episode or member.sample_id for member in members]
    formulas = [{re.sub(r"\s", "", formula) for formula in _FORMULA.findall(text)} for text in texts]
    for i, text in enumerate(texts):
        others = [j for j, other in enumerate(texts) if other and text and episodes[j] != episodes[i]]
        if not others:
            continue
        distances = np.clip(1.0 - cosines[i, others], 0.0, 2.0) / 2
        different = float(episode_weights([members[j] for j in others]) @ distances)
        known = set().union(*(formulas[j] for j in others))
        new = len(formulas[i] - known) / len(formulas[i]) if formulas[i] else 0.0
        found[i] = (1 - formula_share) * different + formula_share * new
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

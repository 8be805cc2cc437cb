"""The loss of an update: the weighted sum of its terms, each over its token set.

The token set of a term is chosen by `where` of its configuration or of its class. Tokens that were not sampled, such as
those of a given solution, have the behavior log-prob NaN and no outputs of the engine. A term that reads one of these
never gets such tokens, so no NaN reaches a value or a gradient. The weights of the tokens of a term have the sum that
they have if the step consists of these tokens alone.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollmesh.shared.config.user_code import reported
from rollmesh.shared.domain.trajectory import Source
from rollmesh.shared.errors import ConfigError, LossFailed, located_at
from rollmesh.trainer.config import LossTermChoice, Normalization
from rollmesh.trainer.losses.base import LOSSES, LossInputs, LossTerm, TokenStats
from rollmesh.trainer.part import UpdatePart

_log = logging.getLogger(__name__)

PLACES = ("policy", "external", "all")
"""Values of `where`."""


@dataclass(slots=True)
class _Term:
    """One summand. `sampled_only`: it reads something that only sampled tokens have."""

    name: str
    weight: float
    loss: LossTerm
    where: str
    sampled_only: bool

    @property
    def mask(self) -> str:
        """The column that is True at its tokens, if they are not all tokens of the step."""
        return f"tokens/{self.name}"

    @property
    def weights(self) -> str:
        """The column of its token weights, if they are not those of the step."""
        return f"token_weight/{self.name}"

    def tokens(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Return its token set among all tokens of the step, [M] boolean."""
        known = ~columns["behavior"].isnan()
        at = known if self.sampled_only else torch.ones_like(known)
        if self.where == "all":
            return at
        policy = columns["source"] == int(Source.POLICY)
        return at & (policy if self.where == "policy" else ~policy)


class LossSum:
    """The weighted sum of the terms. With several of them, the statistics of each have its name in front, as in
    `tis/weight_capped`."""

    def __init__(
        self,
        terms: Sequence[LossTermChoice],
        base_dir: str | Path | None = None,
        normalization: Normalization = Normalization.TOKEN,
    ) -> None:
        """Construct the terms. A user's file is relative to `base_dir`. Raises ConfigError for a name, an option or a
        token set."""
        self._normalization = normalization
        self._prefixed = len(terms) > 1
        self.without_gradient: set[str] = set()
        """Terms that had a value without gradient in this update. The update empties it."""
        self._warned: set[str] = set()
        self._terms: list[_Term] = []
        for index, term in enumerate(terms):
            with located_at(f"learner.loss[{index}]"):
                self._terms.append(self._made(term, base_dir))

    def _made(self, term: LossTermChoice, base_dir: str | Path | None) -> _Term:
        loss: LossTerm = LOSSES.make(term, base_dir)
        where = term.where or loss.where
        if where not in PLACES:
            raise ConfigError(f"loss term {term.short_name}: `where` must be one of {', '.join(PLACES)}, got {where!r}")
        return _Term(term.short_name, term.weight, loss, where, needs_sampled(loss))

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for term in self._terms for name in term.loss.needs))

    @property
    def terms(self) -> dict[str, LossTerm]:
        """The terms by their names."""
        return {term.name: term.loss for term in self._terms}

    @property
    def takes_external(self) -> bool:
        """Whether some term can train tokens that were not sampled."""
        return any(term.where != "policy" and not term.sampled_only for term in self._terms)

    def sampled_only(self, outputs: Collection[str]) -> None:
        """Keep tokens without outputs of the engine from the terms that need some of `outputs`."""
        for term in self._terms:
            term.sampled_only = needs_sampled(term.loss, outputs)

    def tokens(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Return the tokens that some term trains, [M] boolean, given the columns `behavior` and `source`."""
        return torch.stack([term.tokens(columns) for term in self._terms]).any(0)

    def prepare(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the columns that the terms compute over all tokens of an optimizer step, and their token sets. Raises
        LossFailed."""
        prepared = dict[str, Tensor]()
        for term in self._terms:
            at, mine = term.tokens(columns), columns
            whole = bool(at.all())
            if not whole:
                mine = {name: values[at] for name, values in columns.items()}
                mine["token_weight"] = _rescaled(columns, at, self._normalization)
                prepared |= {term.mask: at, term.weights: _spread(mine["token_weight"], at)}
            if bool(at.any()):
                with _reported(term.name):
                    found = term.loss.prepare(mine)
                prepared |= found if whole else {name: _spread(values, at) for name, values in found.items()}
        return prepared

    def _note_no_gradient(self, term: str) -> None:
        """Count a term that cannot train anything, and warn of it once."""
        if term not in self._warned:
            self._warned.add(term)
            _log.warning(
                "the loss term has no gradient, so that it trains nothing: term=%s; compute it from `inputs.logprobs` "
                "or a feature with `grad`, without detach or no_grad",
                term,
            )
        self.without_gradient.add(term)

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        """Return the weighted sum and the statistics of all terms; NaN at tokens outside the set of the term. Raises
        LossFailed."""
        total, stats = inputs.logprobs.new_zeros(()), dict[str, Tensor]()
        for term in self._terms:
            at = inputs.columns.get(term.mask)
            if at is not None and not bool(at.any()):
                continue
            with _reported(term.name):
                mine = inputs if at is None else _selected(inputs, at, inputs[term.weights])
                value, found = term.loss(mine)
                _check(value, found, len(mine.logprobs))
                total = total + term.weight * value
            if not value.requires_grad:
                self._note_no_gradient(term.name)
            prefix = f"{term.name}/" if self._prefixed else ""
            for key, values in found.items():
                stats[f"{prefix}{key}"] = values if at is None else _spread(values.detach(), at, float("nan"))
        return total, stats


def needs_sampled(part: UpdatePart, outputs: Collection[str] = ()) -> bool:
    """Return whether a part of the update reads what only sampled tokens have: behavior log-probs, or some of
    `outputs`."""
    return part.needs_behavior or any(name in outputs for name in part.needs)


def _selected(inputs: LossInputs, at: Tensor, weights: Tensor) -> LossInputs:
    """Return the inputs of the tokens where `at` is True, with these token weights."""
    columns = {name: values[at] for name, values in inputs.columns.items()}
    hidden, after = (None if states is None else states[at] for states in (inputs.hidden, inputs.after))
    return LossInputs(inputs.logprobs[at], columns | {"token_weight": weights[at]}, hidden, after)


def _spread(values: Tensor, at: Tensor, rest: float = 0.0) -> Tensor:
    """Return [M] or [M, k]: `values` of the tokens where `at` [M] is True, and `rest` at the others."""
    spread = values.new_full((len(at), *values.shape[1:]), rest)
    spread[at] = values
    return spread


def _rescaled(columns: Mapping[str, Tensor], at: Tensor, normalization: Normalization) -> Tensor:
    """Return the weights of the tokens where `at` is True as if the step had no other tokens."""
    weight, sample = columns["token_weight"][at], columns["sample"]
    if normalization is Normalization.TOKEN:
        return weight * (len(at) / max(1, int(at.sum())))
    zeros = torch.zeros(int(sample.max()) + 1, dtype=torch.float64, device=at.device)
    before = zeros.index_add(0, sample, torch.ones_like(sample, dtype=torch.float64))
    after = zeros.index_add(0, sample[at], torch.ones_like(sample[at], dtype=torch.float64))
    factor = (before > 0).sum() / (after > 0).sum().clamp(min=1)
    per_sample = (
        before / after.clamp(min=1) if normalization is Normalization.SEQUENCE_MEAN else torch.ones_like(before)
    )
    return weight * (factor * per_sample[sample[at]]).to(weight.dtype)


def _reported(term: str) -> AbstractContextManager[None]:
    """Raise LossFailed with the error and the user's lines if a term raises."""
    return reported(f"the loss term {term}", LossFailed)


def _check(value: Any, stats: TokenStats, count: int) -> None:
    """Raise ValueError unless a term returned a scalar, and statistics of `count` tokens."""
    if not isinstance(value, Tensor) or value.ndim:
        found = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"it returned a loss of {found}, expected a tensor of shape []: sum over the tokens, for example "
            '`(inputs["token_weight"] * loss).sum()`'
        )
    for name, values in stats.items():
        if values.shape != (count,):
            raise ValueError(
                f"it returned the statistic `{name}` of shape {list(values.shape)}, expected [{count}], one number per "
                "token"
            )

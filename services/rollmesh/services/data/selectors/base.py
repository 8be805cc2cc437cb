"""Bases of selectors: a state that is stored as a map, and draws by the categories of the tasks.

The categories of a pool are the values of a label; tasks without it form one category. A draw chooses a category by its
share, and then a task of it, uniformly among those that are not in flight. A category whose tasks are all in flight is
left out while another has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

import msgpack
import numpy as np
from numpy.typing import NDArray

from rollmesh.services.data.labels import categories_of
from rollmesh.services.data.selector import GroupResult, Selector
from rollmesh.services.data.task import TaskPool
from rollmesh.shared.config.plugin import required
from rollmesh.shared.config.settings import Settings
from rollmesh.shared.errors import CorruptSnapshot

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class StoredSelector(Selector):
    """A selector whose snapshot is a map of plain values, with its schema and the digest of its pool."""

    schema: ClassVar[str]
    """Name and version of the snapshot, e.g. `thompson@1`."""

    def __init__(self, pool: TaskPool) -> None:
        self._pool_digest = pool.digest

    @required
    def stored(self) -> dict[str, Any]:
        """Return the state as plain values."""
        raise NotImplementedError

    @required
    def load(self, fields: Mapping[str, Any]) -> None:
        """Replace the state by what `stored` returned. A ValueError, KeyError, TypeError or IndexError is a corrupt
        snapshot, so it MUST be raised before anything is replaced."""

    def snapshot(self) -> bytes:
        return bytes(msgpack.packb({"schema": self.schema, "pool": self._pool_digest, **self.stored()}))

    def restore(self, state: bytes) -> None:
        name = self.schema.partition("@")[0]
        try:
            fields = msgpack.unpackb(state)
            schema, pool = fields["schema"], fields["pool"]
            if schema == self.schema and pool == self._pool_digest:
                self.load(fields)
                return
        except (msgpack.UnpackException, ValueError, KeyError, TypeError, IndexError) as error:
            raise CorruptSnapshot(f"not a snapshot of the {name} selector for this pool: {error!r}") from error
        raise CorruptSnapshot(
            f"snapshot is of {schema} over pool {pool}, this is {self.schema} over {self._pool_digest}"
        )


class CategoryOptions(Settings):
    """Settings of selectors that draw by category."""

    label: str = "level"
    """Task label whose values are the categories."""


class CategorySelector(StoredSelector):
    """A selector that chooses a category by its share."""

    def __init__(self, *, pool: TaskPool, seed: int, label: str) -> None:
        super().__init__(pool)
        self._seed = seed
        found = categories_of(pool, label)
        self.categories, self._category, self._tasks = found.names, found.of_task, found.tasks
        self._num_tasks: Ints = np.array(list(map(len, self._tasks)), dtype=np.int64)

    @required
    def shares(self, num_in_flight: Ints) -> Floats:
        """Return the share of each category in the next draw, >= 0. `num_in_flight` counts its tasks in flight."""
        raise NotImplementedError

    def stored(self) -> dict[str, Any]:
        """Return the names of the categories, to which a subclass adds its state."""
        return {"categories": list(self.categories)}

    def load(self, fields: Mapping[str, Any]) -> None:
        """Raise ValueError unless the state is of the same categories. A subclass calls it first."""
        if fields["categories"] != list(self.categories):
            raise ValueError(f"the categories must be {list(self.categories)}, got {fields['categories']!r}")

    def category_of(self, result: GroupResult) -> int:
        """Return the index in `categories` of the task of a group."""
        return int(self._category[result.position])

    def draw(self, index: int, in_flight: AbstractSet[int]) -> int:
        rng = np.random.default_rng((self._seed, index))
        taken = np.fromiter(in_flight, dtype=np.int64, count=len(in_flight))
        num_in_flight: Ints = np.bincount(self._category[taken], minlength=len(self.categories))
        free = num_in_flight < self._num_tasks
        shares = self.shares(num_in_flight)
        if free.any():
            shares = np.where(free, shares, 0.0) if shares[free].any() else free.astype(np.float64)
        tasks = self._tasks[rng.choice(len(shares), p=shares / shares.sum())]
        left = tasks[~np.isin(tasks, taken)]
        return int(rng.choice(left if len(left) else tasks))


class AdvantageOptions(CategoryOptions):
    """Settings of selectors that follow the advantages of the categories."""

    measure: str = "mean_abs_advantage"
    """Number of the trainer that is the signal of a group."""
    agreement_is_zero: bool = True
    """Whether a group whose members, at least two, all succeed or all fail, counts as 0 when it is decided, and not
    again when it is trained. The finalizer `zero_variance` filters such a group, so that no update measures it, and a
    solved category would keep its last signal. Set it to false, with a finalizer that keeps these groups, if a further
    reward gives them an advantage."""


class AdvantageSelector(CategorySelector):
    """A selector that learns from the mean absolute advantage of each group of a category."""

    def __init__(self, *, pool: TaskPool, seed: int, options: AdvantageOptions) -> None:
        super().__init__(pool=pool, seed=seed, label=options.label)
        self._measure, self._agreement_is_zero = options.measure, options.agreement_is_zero

    @required
    def learn(self, category: int, signal: float, num_samples: float) -> None:
        """Fold the signal of one group with `num_samples` scored members, at least 1."""

    def observe(self, result: GroupResult) -> None:
        if self._agrees(result):
            self.learn(self.category_of(result), 0.0, max(1.0, result.successes + result.failures))

    def observe_trained(self, result: GroupResult) -> None:
        if self._agrees(result) or result.trained is None:
            return
        if (signal := result.trained.measures.get(self._measure)) is not None:
            self.learn(self.category_of(result), signal, max(1.0, result.successes + result.failures))

    def _agrees(self, result: GroupResult) -> bool:
        several = result.successes + result.failures > 1.0  # one member has nothing to agree with
        return self._agreement_is_zero and several and min(result.successes, result.failures) == 0.0


def softmax(scores: Floats, temperature: float) -> Floats:
    """Return exp(scores / temperature), normalized to the sum 1."""
    powers = np.exp((scores - scores.max()) / temperature)
    return np.asarray(powers / powers.sum(), dtype=np.float64)

"""What the trainer measured reaches the selector of a run: a user's selector draws by mean absolute advantage in a
whole mesh."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.mesh import Mesh
from rollmesh.services.coordinator import translate, validation
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.fact_codec import encode_record
from rollmesh.services.data.draws import RunDraws
from rollmesh.services.data.pool import MemoryPool
from rollmesh.services.data.selector import SELECTORS, GroupResult
from rollmesh.services.data.task import PoolTask, TaskPool
from rollmesh.shared.codec.trajectory import encode_trained_group
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.ledger_facts import facts_of
from rollmesh.shared.domain.trajectory import Message, TrainedGroup
from rollmesh.trainer.config import UpdateConfig
from rollmesh.trainer.update import BatchTrainer
from rollmesh.v1 import events_pb2, reward_pb2, run_pb2

from ..chaos.world import mesh_config, save_model_folder
from ..unit.data.builders import created, finalized, leveled, reserved
from ..unit.data.test_draws import fold
from ..unit.trainer.builders import group, member, random_batch
from .test_mesh import Operator

FOLDER = Path(__file__).parents[2] / "examples" / "extending"
NUM_TASKS = 9
SPY = """
import json

class Spy(MostSignal):
    def draw(self, index, in_flight):
        position = super().draw(index, in_flight)
        self.log({"draw": index, "position": position, "signal": self.signal, "in_flight": sorted(in_flight)})
        return position

    def observe(self, result):
        self.log({"observed": result.position, "trained": result.trained})

    def observe_trained(self, result):
        super().observe_trained(result)
        self.log({"position": result.position, "group": result.trained.group, "signal": result.trained.mean_abs_advantage})

    def log(self, line):
        with open(LOG, "a") as file:
            file.write(json.dumps(line) + "\\n")
"""


def test_the_selector_of_the_page_draws_what_was_never_trained_and_then_the_largest_signal() -> None:
    tasks = (PoolTask(task_id=f"t{n}", messages=(Message(role="user", content="?"),)) for n in range(3))
    pool = MemoryPool(tasks)

    def make() -> Any:
        return SELECTORS.make(Extension("most_signal.py:MostSignal"), FOLDER, pool=pool, seed=0)

    selector = make()
    for position, signal in ((0, 0.2), (1, 0.7)):
        measured = TrainedGroup(group="g", measures={"mean_abs_advantage": signal})
        selector.observe(GroupResult(position=position, successes=1.0, failures=1.0))
        selector.observe_trained(GroupResult(position=position, successes=1.0, failures=1.0, trained=measured))
    restored = make()
    restored.restore(selector.snapshot())
    for each in (selector, restored):
        assert [each.draw(9, frozenset(taken)) for taken in ((), {2}, {1, 2})] == [2, 1, 0]


def test_a_new_number_travels_from_an_estimator_to_a_selector_in_one_file_each() -> None:
    """Every hop but the network: trainer, request, ledger record, and the draws of the data service."""
    samples, groups = random_batch()  # groups g0 to g3
    groups[2] = group("g2", *(member(m.sample_id, {"correct": float(n == 0)}) for n, m in enumerate(groups[2].members)))
    config = UpdateConfig(estimator=Extension("best_gap.py:BestGap").located(FOLDER))
    made = BatchTrainer(build_tiny_model(TinyModelConfig(hidden_size=32), seed=1), config, seed=7)
    measured = made.update(1, samples, groups).groups
    request = run_pb2.CommitUpdateRequest(
        run="r",
        trainer_epoch=1,
        update=1,
        lease_ids=["b"],
        outcome=run_pb2.UPDATE_OUTCOME_APPLIED,
        groups=[encode_trained_group(each) for each in measured],
    )
    validation.check_commit(request)
    fact = f.UpdateCommitted(update=1, groups=translate.commit_update(1, request).groups)
    record = events_pb2.LedgerRecord.FromString(encode_record("r1", 1.0, [fact]))
    tasks = MemoryPool(
        PoolTask(task_id=f"t{n}", messages=(Message(role="user", content="?"),)) for n in range(len(groups))
    )
    choice = Extension("most_signal.py:MostSignal", {"measure": "best_gap"})
    draws = RunDraws(pool=tasks, new_selector=lambda pool: SELECTORS.make(choice, FOLDER, pool=pool, seed=0))
    fold(draws, created(), *(reserved(n, f"t{n}") for n in range(4)), *(finalized(n, 1.0) for n in range(4)))
    draws.apply(facts_of(record))
    assert {g.group: g.measures["best_gap"] for g in measured}["g2"] == pytest.approx(0.75)
    assert draws.positions("main", 4, 1) == [2]


@pytest.mark.row("S061")
def test_sec_draws_by_the_advantages_that_the_trainer_reports_and_a_solved_category_fades() -> None:
    """From the trainer through the ledger to the draws, with two groups of each category per update. |A| is 1/2 for the
    groups of `hard`, half of it for `easy`, and 1/2 for `done` until it is solved: then its groups are filtered."""
    names, num = ("hard", "easy", "done"), 6
    tasks = leveled(*names * 10)
    made: list[Any] = []

    def new_selector(pool: TaskPool) -> Any:
        options = {"alpha": 0.5, "temperature": 0.1, "step_groups": num}
        made.append(SELECTORS.make(Extension("sec", options), pool=pool, seed=0))
        return made[-1]

    draws = RunDraws(pool=tasks, new_selector=new_selector)
    fold(draws, created())
    config = UpdateConfig(estimator=Extension("grpo", {"std": "none"}))
    trainer = BatchTrainer(build_tiny_model(TinyModelConfig(hidden_size=32), seed=1), config, seed=7)

    def update(k: int, done: tuple[float, ...]) -> dict[str, float]:
        """Train one update, and return the share of each category in the next draw."""
        samples, groups = random_batch(num, seed=k)
        rewards = [(1.0, 0.0, 1.0, 0.0), (1.0, 0.5, 1.0, 0.5), done] * 2
        kept = []
        for n, (of, values) in enumerate(zip(groups, rewards, strict=True)):
            keep = len(set(values)) > 1
            decision = reward_pb2.GROUP_DECISION_KEEP if keep else reward_pb2.GROUP_DECISION_FILTER
            fold(draws, reserved(num * k + n, f"t{n}", num_episodes=4))
            fold(draws, finalized(num * k + n, *values, decision=decision))
            scored = (member(m.sample_id, {"correct": v}) for m, v in zip(of.members, values, strict=True))
            kept += [group(of.group, *scored)] if keep else []
        used = {of.group for of in kept}
        measured = trainer.update(k, [s for s in samples if s.group in used], kept).groups
        named = (msgspec.structs.replace(each, group=f"g{num * k + int(each.group[1:])}") for each in measured)
        request = run_pb2.CommitUpdateRequest(
            run="r", update=k, lease_ids=["b"], groups=[encode_trained_group(each) for each in named]
        )
        fact = f.UpdateCommitted(update=k, groups=translate.commit_update(1, request).groups)
        draws.apply(facts_of(events_pb2.LedgerRecord.FromString(encode_record(f"r{k}", 1.0, [fact]))))
        (selector,) = made
        shares = selector.shares(np.zeros(len(names), dtype=np.int64)).tolist()
        return dict(zip(selector.categories, shares, strict=True))

    shares = update(1, (0.0, 1.0, 0.0, 1.0))
    # Q = 1/4, 1/8 and 1/4
    assert shares["hard"] / shares["easy"] == pytest.approx(np.exp((1 / 4 - 1 / 8) / 0.1), rel=1e-4)
    assert shares["done"] == pytest.approx(shares["hard"])
    faded = [shares["done"], *(update(k, (1.0,) * 4)["done"] for k in range(2, 6))]
    assert all(later < 0.8 * before for before, later in itertools.pairwise(faded)), faded
    # after five updates Q = 1/2 (1 - 1/32), half of it, and 1/4 / 16
    expected = np.exp(np.array([31 / 64, 31 / 128, 1 / 64]) / 0.1)
    drawn = np.bincount(
        [names.index(tasks.task(made[0].draw(n, frozenset())).labels["level"]) for n in range(1000)], minlength=3
    )
    assert (drawn / 1000).tolist() == pytest.approx((expected / expected.sum()).tolist(), abs=0.05)


@pytest.mark.timeout(120)
async def test_a_selector_of_a_users_own_reads_the_advantages_of_each_committed_group(tmp_path: Path) -> None:
    """Fake model and trainer, and the real mesh: the commits and the calls of the selector agree."""
    log = tmp_path / "selector.jsonl"
    (tmp_path / "spy.py").write_text(f"{(FOLDER / 'most_signal.py').read_text()}\nLOG = {str(log)!r}\n{SPY}")
    made = mesh_config(
        save_model_folder(tmp_path / "model"), batch_groups=3, group_size=4, max_staleness=1, updates_max=8
    )
    source = Extension("calc", {"num_train": NUM_TASKS, "num_validation": 2, "num_test": 2})
    data = msgspec.structs.replace(made.data, source=source, selector=Extension(f"{tmp_path / 'spy.py'}:Spy"))
    async with Mesh(msgspec.structs.replace(made, data=data), run_dir=tmp_path / "run") as mesh:
        operator = Operator(mesh)
        await operator.finished()
        facts = await operator.facts()
    committed = {g.group: g for fact in facts if isinstance(fact, f.UpdateCommitted) for g in fact.groups}
    tokens = {
        fact.update: sum(g.num_tokens for g in fact.groups) for fact in facts if isinstance(fact, f.UpdateCommitted)
    }
    assert len(committed) == 8 * 3
    assert all(g.num_tokens > 0 and g.mean_abs_advantage >= 0 for g in committed.values())
    assert set(tokens) == set(range(1, 9))
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    seen = {line["group"]: line["signal"] for line in lines if "group" in line}
    assert seen, "the run has ended before the selector saw a commit"
    assert seen.items() <= {name: group.mean_abs_advantage for name, group in committed.items()}.items()
    assert all(line["trained"] is None for line in lines if "observed" in line)
    draws = [line for line in lines if "draw" in line]
    for line in draws:
        signal = [float("inf") if value is None else value for value in line["signal"]]
        free = [value for position, value in enumerate(signal) if position not in line["in_flight"]]
        assert signal[line["position"]] == max(free or signal)
    assert any(line["signal"][line["position"]] is not None for line in draws), "no draw chose by a measurement"

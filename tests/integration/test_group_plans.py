"""Groups with plans at a coordinator and a data service over real gRPC, with a real nats-server."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from rollmesh.mesh import Mesh
from rollmesh.services.coordinator.audit import audit_run
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.ledger import read_ledger
from rollmesh.services.data.config import DataConfig
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.plans import SamplingOverrides, Variant
from rollmesh.shared.errors import InvalidInput
from rollmesh.v1 import coordinator_pb2 as pb
from rollmesh.v1 import types_pb2

from ..chaos.world import mesh_config, save_model_folder
from .coordinator_mesh import DATA, REWARD, ROLLOUT, MeshParts, coordinator_mesh, eventually
from .test_mesh import Operator

PLANNER = """
from rollmesh.services.data.selector import Plan, SamplingOverrides, Selector, Variant

HOT = SamplingOverrides(temperature=1.3)

class Planner(Selector):
    def __init__(self, *, pool, seed):
        pass

    def draw(self, index, in_flight):
        return index

    def plan(self, index, position, in_flight):
        return {plans}.get(index, Plan())

    def observe(self, result):
        pass

    def snapshot(self):
        return b""

    def restore(self, state):
        pass
"""
UNEQUAL = """{
    0: Plan(size=1),
    1: Plan(variants=(Variant(name="plain"), Variant(name="hot", count=2, sampling=HOT)), propensity=0.5),
}"""


@asynccontextmanager
async def planned_mesh(tmp_path: Path, plans: str) -> AsyncIterator[MeshParts]:
    (tmp_path / "planner.py").write_text(PLANNER.format(plans=plans))
    data = DataConfig(selector=Extension(f"{tmp_path}/planner.py:Planner"))
    async with coordinator_mesh(tmp_path, data=data) as parts:
        yield parts


def variants(leases: list[pb.EpisodeLease]) -> list[tuple[str, str]]:
    return [(lease.key.group, lease.variant.name) for lease in leases]


async def reserved(mesh: MeshParts) -> list[f.GroupReserved]:
    log = await mesh.bus.open(run_streams(mesh.name).ledger.name)
    return [fact async for record in read_ledger(log) for fact in record.facts if isinstance(fact, f.GroupReserved)]


@pytest.mark.parametrize("rolls_over", [False, True], ids=["one_life", "restarted"])
async def test_the_plan_of_a_selector_reaches_the_leases_the_batch_and_the_audit(
    tmp_path: Path, rolls_over: bool
) -> None:
    async with planned_mesh(tmp_path, UNEQUAL) as mesh:
        await mesh.begin(max_staleness=0)
        leases = [*await mesh.acquire(1), *await mesh.acquire(1)]
        assert variants(leases) == [("g0", ""), ("g1", "plain")]
        assert not leases[0].HasField("variant")
        if rolls_over:
            await mesh.stop_coordinator()
            await mesh.start_coordinator()
            await mesh.wait_ready(ROLLOUT, DATA, REWARD)
        rest = await mesh.acquire(8)
        assert variants(rest) == [("g1", "hot"), ("g1", "hot")]
        assert rest[0].variant.sampling.temperature == 1.3
        assert await mesh.generate([*leases, *rest], step=0) == [""] * 4
        batch = await mesh.lease(1)
        assert {group.group: len(group.members) for group in batch.groups} == {"g0": 1, "g1": 3}
        assert [member.summary.variant for member in batch.groups[1].members] == ["plain", "hot", "hot"]
        assert [group.propensity for group in batch.groups] == [0.0, 0.5]
        fetched = {name for message in await mesh.fetch(batch.lease_id) for name in message.sample_ids}
        assert fetched == {sample.meta.sample_id for sample in batch.samples}
        digest = (await mesh.commit(1, [batch.lease_id])).digest
        await mesh.checkpoint(1, digest)
        assert [(one.num_episodes, len(one.variants), one.propensity) for one in await reserved(mesh)] == [
            (1, 0, 0.0),
            (3, 2, 0.5),
        ]
        report = await audit_run(mesh.bus, mesh.name, payloads=True)
        assert report.holds, report.to_text()
        assert report.samples.trained == 4


async def test_the_variants_of_the_run_are_the_plan_of_a_data_service_that_plans_nothing(tmp_path: Path) -> None:
    async with coordinator_mesh(tmp_path) as mesh:
        named = [types_pb2.Variant(name=name, count=1) for name in ("a", "b")]
        await mesh.begin(variants=named)
        assert variants(await mesh.acquire(4)) == [("g0", "a"), ("g0", "b"), ("g1", "a"), ("g1", "b")]
        state = await mesh.state()
        assert state.samples.reserved == 4
        with pytest.raises(
            InvalidInput, match=r"`spec.variants` must have counts that sum to the size of the group, 2"
        ):
            await mesh.create(run="other", variants=named[:1])


@pytest.mark.parametrize(
    ("plans", "why"),
    [
        ("{0: Plan(size=5)}", "the selector's plan for draw 0, task .* does not fit the run: `size` must be <= 4"),
        ("{0: 3}", "the plan of the selector Planner for draw 0 must be a Plan, got a int"),
        ("{0: Plan(size=-1)}", r"the plan of the selector Planner for draw 0: `size` must be in \[0, 16384\], got -1"),
    ],
    ids=["batch", "type", "range"],
)
async def test_a_run_waits_for_a_plan_that_fits_and_names_the_cause(tmp_path: Path, plans: str, why: str) -> None:
    async with planned_mesh(tmp_path, plans) as mesh:
        await mesh.begin()
        found = ""

        async def named() -> bool:
            nonlocal found
            request = pb.AcquireRolloutsRequest(node_id=mesh.worker, num_max=1, wait_s=0.05)
            found = (await mesh.call(mesh.coordinator.AcquireRollouts, request)).waiting_for
            return "plan" in found

        await eventually(named)
        assert re.search(why, found), found
        assert not await reserved(mesh)


@pytest.mark.timeout(120)
async def test_a_whole_mesh_trains_groups_whose_episodes_have_variants_of_the_configuration(tmp_path: Path) -> None:
    """Fake model and trainer, which compares each payload with its lease; everything else is real."""
    variants = (
        Variant(name="plain", count=2),
        Variant(name="hot", sampling=SamplingOverrides(temperature=1.5, max_tokens=5), prefix="It is", role="risky"),
        Variant(name="once", agent="once", hint="Answer at once."),
    )
    made = mesh_config(
        save_model_folder(tmp_path / "model"), batch_groups=2, group_size=4, max_staleness=1, updates_max=3,
        variants=[to_builtins(one) for one in variants],
    )  # fmt: skip
    rollout = replace(made.rollout, agents={"once": Extension("single_turn")})
    async with Mesh(replace(made, rollout=rollout), run_dir=tmp_path / "run") as mesh:
        operator = Operator(mesh)
        await operator.finished()
        facts, report = await operator.facts(), await operator.audit()
    assert report.holds, report.to_text()
    assert all(fact.variants == variants for fact in facts if isinstance(fact, f.GroupReserved))
    scored = [fact for fact in facts if isinstance(fact, f.EpisodeScored)]
    seen = {(int(fact.episode.rpartition(".")[2]), fact.samples[0].summary.variant) for fact in scored}
    assert seen == {(0, "plain"), (1, "plain"), (2, "hot"), (3, "once")}
    for fact in scored:
        (sample,) = fact.samples
        summary = sample.summary
        assert summary.role == ("risky" if summary.variant == "hot" else "")
        assert len(summary.turns) == (1 if summary.variant == "once" else 3)
        if summary.variant == "hot":
            assert max(turn.num_tokens for turn in summary.turns) <= 5

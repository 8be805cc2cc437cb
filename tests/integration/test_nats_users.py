"""Each kind of service uses its own NATS user: it needs every permission that it has, and the server rejects everything
else."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from nats.aio.client import Client

from rollmesh.app.nats_files import ALL
from rollmesh.mesh import Mesh, MeshConfig
from rollmesh.services.coordinator.audit import audit_run
from rollmesh.shared.bus.bus import BusUnavailable
from rollmesh.shared.bus.jetstream_bus import JetStreamBus, JetStreamConfig
from rollmesh.shared.bus.link import BusPermission
from rollmesh.shared.bus.login import BusLogin
from rollmesh.shared.bus.permissions import COORDINATOR, DATA, GATEWAY, OPERATOR, PUBLISH, ROLLOUT, inbox_of, role_of
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.errors import ConfigError, HasLearner, NotReady
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.v1 import run_pb2, run_pb2_grpc

from ..chaos.world import mesh_config, save_model_folder
from ..nats_cluster import NatsCluster
from .test_mesh import Operator, policy

PROCESSES = (
    ("coordinator",), ("depot", "reward"), ("data",), ("inference-0", "sandbox-0"), ("gateway",), ("rollout-0",), ("learner",),
)  # fmt: skip
UNUSED = {
    GATEWAY: {"RM.*.DEAD", "$JS.API.STREAM.MSG.GET.*"},
    COORDINATOR: {"RM.*.DEAD", "$JS.API.DIRECT.GET.*", "$JS.API.STREAM.LIST"},
}
"""For failed tasks and unreadable payloads, which this run does not have, for a payload that a lagging server lacks,
and for commands that run in the pod of the coordinator."""
STREAMS = run_streams("r")
SHORT = JetStreamConfig(deadline_s=3.0, attempt_s=1.0)


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[NatsCluster]:
    """A single server with the users of a mesh."""
    async with NatsCluster(tmp_path / "nats", names=("a",), member=False) as server:
        yield server


def config(model: Path, nats: NatsCluster) -> MeshConfig:
    made = mesh_config(model, batch_groups=2, group_size=4, updates_max=8, episode_lease_s=1.0)
    bus = msgspec.structs.replace(made.bus, url=nats.url, login_file=str(nats.logins / ALL))
    counts = msgspec.structs.replace(made.counts, inference=1)
    return msgspec.structs.replace(made, bus=bus, counts=counts)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """The subjects to which each user has published."""
    found: dict[str, set[str]] = defaultdict(set)
    publish = Client.publish

    async def record(self: Client, subject: str, *args: Any, **options: Any) -> None:
        found[str(self.options["user"]).rpartition("-")[2]].add(subject)
        await publish(self, subject, *args, **options)

    monkeypatch.setattr(Client, "publish", record)
    return found


def matches(pattern: str, subject: str) -> bool:
    parts = [{"*": r"[^.]+", ">": r".+"}.get(part, re.escape(part)) for part in pattern.split(".")]
    return re.fullmatch(r"\.".join(parts), subject) is not None


async def export(operator: Operator) -> None:
    async with open_channel(operator.mesh.gateway_address, access=operator.mesh.access) as channel:
        stub: Any = run_pb2_grpc.RunServiceStub(channel)
        with typed_errors():
            async for _ in stub.StreamSamples(run_pb2.StreamSamplesRequest(run=operator.mesh.run)):
                pass


async def delete_run(operator: Operator) -> None:
    """Delete the run once the depot has joined the restarted coordinator."""
    async with asyncio.timeout(30):
        while True:
            with suppress(NotReady):
                await operator.call("DeleteRun", run_pb2.DeleteRunRequest(run=operator.mesh.run))
                return
            await asyncio.sleep(0.05)


@pytest.mark.timeout(120)
async def test_every_service_uses_each_of_its_permissions_and_needs_no_other(
    tmp_path: Path, nats: NatsCluster, used: dict[str, set[str]], caplog: pytest.LogCaptureFixture
) -> None:
    made = config(save_model_folder(tmp_path / "model"), nats)
    async with AsyncExitStack() as stack:
        meshes = [
            await stack.enter_async_context(Mesh(made, run_dir=tmp_path / "run", services=services))
            for services in PROCESSES
        ]
        operator = Operator(meshes[-1])
        await operator.until(lambda state: policy(state).applied_step >= 1)
        await meshes[2].restart("data")  # it compares its snapshot with the ledger
        await operator.finished()
        await meshes[0].restart("coordinator")  # it reads the ledger, and reduces the room of the ended run
        with pytest.raises(HasLearner):
            await export(operator)  # it reads the beginning of the ledger
        await operator.until(lambda state: bool(state.ended) and state.samples.live == 0)
        bus = await nats.connect()
        try:
            assert (await audit_run(bus, made.run.name, checkpoint=tmp_path / "run/checkpoints")).holds
        finally:
            await bus.close()
        await delete_run(operator)
    assert used.keys() == {COORDINATOR, ROLLOUT, DATA, GATEWAY, OPERATOR}, "the other services have no connection"
    for role in (COORDINATOR, ROLLOUT, DATA, GATEWAY):
        idle = {one for one in PUBLISH[role] if not any(matches(one, subject) for subject in used[role])}
        assert idle == UNUSED.get(role, set()), f"{role} does not use {idle}"
        extra = {s for s in used[role] if not any(matches(one, s) for one in PUBLISH[role])}
        assert not extra, f"{role} needs {extra}"
    assert "may not publish" not in caplog.text


@pytest.mark.parametrize("role", [COORDINATOR, ROLLOUT, DATA, GATEWAY])
async def test_a_user_writes_only_its_streams(nats: NatsCluster, role: str) -> None:
    allowed = {COORDINATOR: {"LEDGER", "DEAD"}, ROLLOUT: {"SAMPLES"}, GATEWAY: {"DEAD"}}.get(role, set())
    operator, bus = await nats.connect(), await nats.connect(role, config=SHORT)
    try:
        for spec in (STREAMS.ledger, STREAMS.samples, STREAMS.dead):
            await operator.create(spec)
            log = await bus.open(spec.name)
            if spec.name.rpartition("_")[2] in allowed:
                assert await log.append(b"x", msg_id="m") == 1
                continue
            with pytest.raises(
                BusPermission, match=rf"user lab-{role} may not publish to RM\.r\.[A-Z]+; `bus.login_file`"
            ):
                await log.append(b"x", msg_id="m")
            assert await (await operator.open(spec.name)).last() is None
    finally:
        await operator.close()
        await bus.close()


async def test_a_worker_cannot_read_purge_or_delete_and_does_not_hear_the_answers_to_others(nats: NatsCluster) -> None:
    operator, bus = await nats.connect(), await nats.connect(ROLLOUT, config=SHORT)
    try:
        log = await operator.create(STREAMS.ledger)
        await log.append(b"decision", msg_id="m")
        worker = await bus.open(STREAMS.ledger.name)
        for attempt in (lambda: worker.read(1), lambda: worker.purge_below(2), lambda: bus.delete(STREAMS.ledger.name)):
            with pytest.raises(BusPermission, match="user lab-rollout may not publish"):
                await attempt()
        assert (await log.read(1)).payload == b"decision"
    finally:
        await operator.close()
        await bus.close()
    errors: asyncio.Queue[Exception] = asyncio.Queue()
    client = Client()
    login = nats.login(ROLLOUT)
    await client.connect(nats.url, user=login.user, password=login.password, error_cb=errors.put)
    await client.subscribe(f"{inbox_of('lab-gateway')}.>")
    async with asyncio.timeout(10.0):
        assert "permissions violation for subscription" in str(await errors.get()).lower()
    await client.close()


@pytest.mark.parametrize("subject", ["RM.r.SAMPLES", f"$JS.API.STREAM.INFO.{STREAMS.ledger.name}", "$JS.API.INFO"])
async def test_a_worker_cannot_have_an_answer_stored_in_a_ledger(nats: NatsCluster, subject: str) -> None:
    """The server publishes an answer to any subject that a request names, with its own permissions."""
    operator, login = await nats.connect(), nats.login(ROLLOUT)
    client = Client()
    await client.connect(nats.url, user=login.user, password=login.password, inbox_prefix=inbox_of(login.user))
    try:
        ledger = await operator.create(STREAMS.ledger)
        samples = await operator.create(STREAMS.samples)
        await client.publish(subject, b"", reply="RM.r.LEDGER")
        answer = await client.request(subject, b"", timeout=10)  # the server has processed the one before
        assert b'"error":' not in answer.data
        assert await ledger.last() is None
        assert (await samples.last() is not None) == (subject == "RM.r.SAMPLES")
    finally:
        await client.close()
        await operator.close()


async def test_a_wrong_password_is_reported_with_the_user_and_the_setting(nats: NatsCluster) -> None:
    with pytest.raises(BusUnavailable, match=r"rejects the password of user lab-data; `bus.login_file`"):
        await JetStreamBus.connect(nats.url, login=BusLogin(user="lab-data", password="wrong"))


def test_a_login_file_has_one_user_for_all_or_one_for_the_role(tmp_path: Path) -> None:
    path = tmp_path / "login"
    path.write_text("me:secret\n")
    assert BusLogin.read(path, role=ROLLOUT).user == "me"
    path.write_text("lab-rollout:a\nlab-data:b\n")
    assert BusLogin.read(path, role=DATA).password == "b"
    with pytest.raises(
        ConfigError, match=r"must contain one user that ends in -coordinator .* got lab-rollout, lab-data"
    ):
        BusLogin.read(path, role=COORDINATOR)


def test_a_process_has_the_user_of_its_services() -> None:
    assert role_of(["rollout-3"]) == ROLLOUT
    assert role_of(["gateway"]) == GATEWAY
    assert role_of(["depot", "data", "reward"]) == DATA
    assert role_of(["coordinator", "gateway"]) == OPERATOR
    assert role_of(["inference-0", "sandbox-1", "learner", "depot", "endpoint-judge-0"]) == ""

"""The description of a mesh for joining nodes: its configuration, and its current state.

The creator of a mesh gives the configuration to the coordinator. A coordinator that was started alone has none.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from rollmesh.services.coordinator import validation
from rollmesh.services.coordinator.core.core import Core
from rollmesh.services.coordinator.core.fleet import NodeKind
from rollmesh.services.coordinator.core.records import RunSpec
from rollmesh.services.coordinator.fact_codec import encode
from rollmesh.services.coordinator.fleet_keeper import FleetKeeper
from rollmesh.services.coordinator.runs import Runs
from rollmesh.shared.domain.ledger_head import LedgerHead
from rollmesh.shared.domain.protocol import PROTOCOL
from rollmesh.shared.errors import EpisodesNotServed, InvalidSpec, MeshBusy, Unimplemented, field_error
from rollmesh.shared.process.process_info import installed_version
from rollmesh.shared.weights.model_files import ModelFiles
from rollmesh.v1 import coordinator_pb2 as pb
from rollmesh.v1 import types_pb2

_TABLES = {"agent": "rollout.agents", "tools": "rollout.tools", "oracle_ref": "reward.oracles"}
"""The table of the configuration with what a field of a task names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshDescription:
    """The constant part. It is returned unchanged, so it must not contain a secret."""

    config_yaml: str
    coordinator: str
    """host:port at which nodes reach the coordinator."""
    bus_url: str
    policy: str
    """Policy whose weights the inference nodes serve."""
    base_dir: str
    """Directory on this host to which file names in the configuration are relative."""
    model: ModelFiles | None = None
    needs_submissions: bool = False
    """Whether the data service has no training tasks, so that every run that draws some needs those of clients."""
    agents: tuple[str, ...] = ()
    """Names of the agents that a task may name."""
    private_agents: tuple[str, ...] = ()
    """Names of the agents that may read private extras of their tasks; the empty name is that of the default agent."""
    application_agents: tuple[str, ...] = ()
    """Names of the agents that serve episodes to applications; the empty name is that of the default agent."""
    tools: tuple[str, ...] = ()
    """Names of the tools that a task may list."""
    oracles: tuple[str, ...] = ()
    """Schemes of the answer keys that the reward service has itself."""
    payloads: str = "stream"
    """Where workers on this host store payloads: files or stream."""


class MeshDescriber:
    """The configuration and the current state, and a check which runs the mesh can serve."""

    def __init__(self, offer: MeshDescription | None, runs: Runs, keeper: FleetKeeper) -> None:
        self._given = offer
        self._runs = runs
        self._keeper = keeper

    async def describe(self) -> pb.GetMeshResponse:
        """Return the description. Raises `Unimplemented` without a configuration."""
        offer = self._offer()
        runs = [pb.MeshRun(run=run, ended=ended.reason) for run, ended in self._runs.ended.items()]
        runs += [pb.MeshRun(run=run, ended=await driver.read(_ended)) for run, driver in self._runs.drivers.items()]
        return pb.GetMeshResponse(
            config_yaml=offer.config_yaml,
            coordinator=offer.coordinator,
            gateways=self._keeper.addresses(NodeKind.GATEWAY, ""),
            depots=self._keeper.addresses(NodeKind.DEPOT, ""),
            bus_url=offer.bus_url,
            base_dir=offer.base_dir,
            runs=runs,
            model_files=offer.model.listing if offer.model is not None else (),
            payloads=offer.payloads,
            protocol=encode(PROTOCOL, pb.ProtocolVersion),
            version=installed_version(),
        )

    async def check_run(self, spec: RunSpec) -> None:
        """Check whether the nodes of the mesh can serve a new run, because a run that no node serves would only wait.

        Raises InvalidInput for another policy than that of the nodes, InvalidSpec for a run without tasks, MeshBusy
        while they serve another run.
        """
        if self._given is None:
            return
        if spec.policy != self._given.policy:
            must = f"be {self._given.policy!r}, which this mesh's inference nodes serve"
            raise field_error("spec.policy", must, spec.policy)
        if self._given.needs_submissions and not spec.submitted_tasks:
            must = "be true, because the data service of this mesh has no tasks (`data.source` is `submitted`)"
            raise field_error("spec.submitted_tasks", must, spec.submitted_tasks, of=InvalidSpec)
        for run, driver in self._runs.drivers.items():
            if run != spec.run and not await driver.read(_ended):
                raise MeshBusy(
                    f"run {run} is live, and this mesh's inference nodes serve one run at a time; `rollmesh stop "
                    f"{run}` (StopRun) ends it; or use another mesh",
                    run=run,
                )

    @property
    def tokenizer_digest(self) -> str:
        """SHA-256 of the tokenizer.json of the model, in lower-case hex; empty if it is not known."""
        files = self._given.model.listing if self._given is not None and self._given.model is not None else ()
        return next((file.sha256 for file in files if file.name == "tokenizer.json"), "")

    def check_tasks(self, tasks: Sequence[types_pb2.Task], *, by_agent: bool = True) -> None:
        """Check that the mesh has the agents, tools and oracles of submitted tasks, and that the agents read no private
        extras. Raises InvalidInput with the task and the field. A coordinator without a configuration checks nothing.
        `by_agent`: an agent runs on them."""
        if self._given is None:
            return
        for index, task in enumerate(tasks):
            if task.agent in self._given.private_agents and by_agent:
                raise field_error(
                    f"{validation.task_place(index, task)}.agent",
                    "name an agent that reads no private extras, because a submitted task has none",
                    task.agent or "the default agent",
                    "choose another agent, or remove its entry of rollout.private_extras",
                )
            for field, named, known in (
                ("agent", [task.agent] if task.agent and by_agent else [], self._given.agents),
                ("tools", task.tools, self._given.tools),
                ("oracle_ref", _schemes(task.oracle_ref), self._given.oracles),
            ):
                for name in named:
                    if name not in known:
                        must = f"name what this mesh has ({', '.join(known) or 'none'})"
                        raise field_error(
                            f"{validation.task_place(index, task)}.{field}",
                            must,
                            name,
                            f"add it to {_TABLES[field]}",
                        )

    def application_agent(self, name: str) -> str:
        """Return the agent for a task that an application opens: `name`, or without one the default agent or the first
        one that serves applications. Raises EpisodesNotServed if it does not."""
        if not name and self._given is not None and "" not in self._given.application_agents:
            name = next(iter(self._given.application_agents), "")
        self.check_application(name)
        return name

    def check_application(self, agent: str) -> None:
        """Check that an agent serves applications. Raises EpisodesNotServed. A coordinator without a configuration
        checks nothing."""
        if self._given is not None and agent not in self._given.application_agents:
            known = ", ".join(name or "the default agent" for name in self._given.application_agents) or "none"
            raise EpisodesNotServed(
                f"the agent of the episode must be one of the agents `application` of this mesh ({known}), got "
                f"{agent or 'the default agent'}; name one in `task.agent`, or add `rollout: {{agents: {{live: "
                "application}}` to the configuration of the mesh"
            )

    async def model_files(self, request: pb.FetchModelFilesRequest) -> AsyncIterator[pb.FetchModelFilesResponse]:
        """Yield the files. Raises `Unimplemented` without a configuration, `UnknownBlob` for a file that is not
        offered."""
        model = self._offer().model
        if model is None:
            raise Unimplemented("this mesh's configuration names no model; configure the model's folder on the node")
        async for piece in model.pieces(request.names):
            yield piece

    def _offer(self) -> MeshDescription:
        if self._given is None:
            raise Unimplemented("this coordinator was started without the configuration of a mesh")
        return self._given


def _schemes(oracle_ref: str) -> list[str]:
    return [oracle_ref.partition(":")[0]] if oracle_ref else []


def _ended(core: Core, _: LedgerHead) -> str:
    return core.state.ended

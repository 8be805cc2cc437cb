"""What a coordinator tells somebody who wants to add a node: the mesh as its operator configured it, and as it stands now.

The offer is made by whoever puts a mesh together; a coordinator that runs by itself has none and says so.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from rollmesh.services.coordinator.core.core import Core
from rollmesh.services.coordinator.core.fleet import NodeKind
from rollmesh.services.coordinator.core.records import RunSpec
from rollmesh.services.coordinator.fleet_keeper import FleetKeeper
from rollmesh.services.coordinator.runs import Runs
from rollmesh.shared.errors import FieldViolation, InvalidInput, MeshBusy, Unimplemented
from rollmesh.shared.ledger_head import LedgerHead
from rollmesh.shared.model_files import ModelFiles
from rollmesh.v1 import coordinator_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshDescription:
    """The part that does not change. It is handed out as it is: no secret may be in it."""

    config_yaml: str
    coordinator: str
    """host:port at which nodes reach the coordinator."""
    bus_url: str
    policy: str
    """The one whose weights the mesh's inference nodes serve."""
    base_dir: str
    """Folder on this host in which files that the configuration names are looked up."""
    model: ModelFiles | None = None


class MeshDescriber:
    """The offer together with what is known now, and which runs the mesh can serve."""

    def __init__(self, offer: MeshDescription | None, runs: Runs, keeper: FleetKeeper) -> None:
        self._given = offer
        self._runs = runs
        self._keeper = keeper

    async def describe(self) -> pb.GetMeshResponse:
        """Raises `Unimplemented` without an offer."""
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
        )

    async def check_run(self, spec: RunSpec) -> None:
        """Whether the mesh's nodes can serve a new run. Told now: a run that no node serves would only wait.

        Raises InvalidInput for another policy than the nodes', MeshBusy while they serve another run.
        """
        if self._given is None:
            return
        if spec.policy != self._given.policy:
            what = f"is {spec.policy!r}, but this mesh's inference nodes serve {self._given.policy!r}"
            raise InvalidInput(f"spec.policy {what}", violations=[FieldViolation("spec.policy", what)])
        for run, driver in self._runs.drivers.items():
            if run != spec.run and not await driver.read(_ended):
                raise MeshBusy(
                    f"run {run} is live, and this mesh's inference nodes serve one run at a time; StopRun it first, or use "
                    "another mesh",
                    run=run,
                )

    async def model_files(self, request: pb.FetchModelFilesRequest) -> AsyncIterator[pb.FetchModelFilesResponse]:
        """Raises `Unimplemented` without an offer, `UnknownBlob` for a file that is not offered."""
        model = self._offer().model
        if model is None:
            raise Unimplemented("this mesh's configuration names no model; give the node the model's folder by hand")
        async for piece in model.pieces(request.names):
            yield piece

    def _offer(self) -> MeshDescription:
        if self._given is None:
            raise Unimplemented("this coordinator was started by itself and knows no configuration of a mesh")
        return self._given


def _ended(core: Core, _: LedgerHead) -> str:
    return core.state.ended

"""RunService at the coordinator: the decisions. The gateway adds payloads and forwards all other calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from rollmesh.services.coordinator import sample_submissions, translate, validation
from rollmesh.services.coordinator.applications import Applications
from rollmesh.services.coordinator.config import SamplesConfig, SubmissionConfig
from rollmesh.services.coordinator.core import application_episodes
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.core import Core
from rollmesh.services.coordinator.core.facts import ConfigChange
from rollmesh.services.coordinator.core.fleet import NodeKind
from rollmesh.services.coordinator.core.records import RunSpec
from rollmesh.services.coordinator.dead_letters import DeadLetters
from rollmesh.services.coordinator.driver import RunDriver
from rollmesh.services.coordinator.fact_codec import decode, encode, encode_into
from rollmesh.services.coordinator.fleet_keeper import FleetKeeper
from rollmesh.services.coordinator.mesh_description import MeshDescriber
from rollmesh.services.coordinator.peers import Outgoing
from rollmesh.services.coordinator.run_state import run_state
from rollmesh.services.coordinator.runs import Runs
from rollmesh.services.coordinator.watchdog import read_chain
from rollmesh.shared.clock import Clock
from rollmesh.shared.domain.ids import IdSource
from rollmesh.shared.domain.ledger_head import LedgerHead
from rollmesh.shared.domain.protocol import PROTOCOL
from rollmesh.shared.domain.text import count_of
from rollmesh.shared.errors import NotReady, NotUploaded, Unimplemented, UnknownRun
from rollmesh.shared.rpc.handlers import Context
from rollmesh.shared.rpc.limits import MESSAGE_BYTES_MAX
from rollmesh.v1 import run_pb2 as pb
from rollmesh.v1 import run_pb2_grpc

DEFAULT = translate.DEFAULT_NAME


class RunServicer(run_pb2_grpc.RunServiceServicer):
    """The RPCs of RunService that are decisions."""

    def __init__(
        self,
        runs: Runs,
        keeper: FleetKeeper,
        outgoing: Outgoing,
        dead: DeadLetters,
        mesh: MeshDescriber,
        *,
        clock: Clock,
        ids: IdSource,
        deadline_s: float,
        message_bytes_max: int,
        submitted: SubmissionConfig,
        samples: SamplesConfig,
        applications: Applications,
    ) -> None:
        """`deadline_s` is the server's limit for a call without a deadline, `message_bytes_max` that of its
        messages."""
        # Channels have the default limit.
        self._message_bytes_max = min(message_bytes_max, MESSAGE_BYTES_MAX)
        self._deadline_s = deadline_s
        self._ids = ids
        self._submitted = submitted
        self._samples = samples
        self._applications = applications
        self._dead = dead
        self._clock = clock
        self._runs = runs
        self._keeper = keeper
        self._outgoing = outgoing
        self._mesh = mesh
        self._final: dict[str, pb.RunState] = {}
        """States of ended runs, as last read."""

    async def CreateRun(self, request: pb.CreateRunRequest, context: Context) -> pb.CreateRunResponse:
        spec = translate.run_spec(request.spec)
        await self._mesh.check_run(spec)
        return pb.CreateRunResponse(created=await self._runs.create(spec))

    async def ChangeRun(self, request: pb.ChangeRunRequest, context: Context) -> pb.ChangeRunResponse:
        validation.check_change(request)
        spec = translate.run_spec(request.spec)
        driver = await self._runs.get(spec.run)
        await self._mesh.check_run(spec)
        await self._runs.reserve(spec.run)
        changes = tuple(decode(ConfigChange, change) for change in request.changes)
        changed = await driver.submit(
            lambda ticket: m.ChangeRun(ticket=ticket, spec=spec, changes=changes, change_id=request.change_id)
        )
        return encode(changed, pb.ChangeRunResponse)

    async def AttachTrainer(self, request: pb.AttachTrainerRequest, context: Context) -> pb.AttachTrainerResponse:
        validation.check_attach(request)
        driver = await self._runs.get(request.run)
        depot = self._depot(request.run)
        attached = await driver.submit(lambda ticket: translate.attach_trainer(ticket, request))
        spec = await driver.read(lambda core, _: core.state.the_spec)
        return _attached(request, attached, spec, depot)

    def _depot(self, run: str) -> str:
        """Return the address for uploads. A trainer that cannot publish must not fence its predecessor, so this comes
        before the attach."""
        for address in self._keeper.addresses(NodeKind.DEPOT, run):
            return address
        raise NotReady(f"no depot has joined yet for the weights of run {run}; start one, or retry", run=run)

    async def LeaseBatch(self, request: pb.LeaseBatchRequest, context: Context) -> pb.LeaseBatchResponse:
        validation.check_trainer(request)
        validation.check_update(request.update)
        wait_s = translate.wait_s(request.wait_s, context.time_remaining() or self._deadline_s)
        driver = await self._runs.get(request.run)
        batch = await driver.submit(
            lambda ticket: translate.lease_batch(ticket, request, wait_s, self._message_bytes_max)
        )
        return encode(batch, pb.LeaseBatchResponse)

    async def RenewBatch(self, request: pb.RenewBatchRequest, context: Context) -> pb.RenewBatchResponse:
        validation.check_trainer(request)
        driver = await self._runs.get(request.run)
        reply = await driver.submit(lambda ticket: translate.trainer_request(m.RenewBatch, ticket, request))
        return encode(reply, pb.RenewBatchResponse)

    async def CommitUpdate(self, request: pb.CommitUpdateRequest, context: Context) -> pb.CommitUpdateResponse:
        validation.check_commit(request)
        driver = await self._runs.get(request.run)
        committed, head = await driver.submit_with_head(lambda ticket: translate.commit_update(ticket, request))
        return pb.CommitUpdateResponse(digest=committed.digest, ledger_position=head.position, ledger_hash=head.hash)

    async def ReleaseBatch(self, request: pb.ReleaseBatchRequest, context: Context) -> pb.ReleaseBatchResponse:
        validation.check_trainer(request)
        driver = await self._runs.get(request.run)
        await driver.submit(lambda ticket: translate.trainer_request(m.ReleaseBatch, ticket, request))
        return pb.ReleaseBatchResponse()

    async def ReportCheckpoint(
        self, request: pb.ReportCheckpointRequest, context: Context
    ) -> pb.ReportCheckpointResponse:
        validation.check_checkpoint(request)
        driver = await self._runs.get(request.run)
        await driver.submit(lambda ticket: translate.trainer_request(m.ReportCheckpoint, ticket, request))
        return pb.ReportCheckpointResponse()

    async def PublishVersion(self, request: pb.PublishVersionRequest, context: Context) -> pb.PublishVersionResponse:
        validation.check_publish(request)
        version = translate.version_of(request)
        driver = await self._runs.get(request.run)
        missing = await self._outgoing.missing_blobs(request.run, version.weights_digest)
        if missing:
            raise NotUploaded(
                f"the depot lacks {count_of(len(missing), 'blob')} of {version.weights_digest}, first {missing[0]}: "
                "upload them, then publish again",
                missing=len(missing),
                first=missing[0],
            )
        await driver.submit(
            lambda ticket: i.PublishVersion(
                ticket=ticket,
                policy=version.policy,
                learner=request.learner or DEFAULT,
                trainer_epoch=request.trainer_epoch,
                version=version,
            )
        )
        self._keeper.hurry()
        return pb.PublishVersionResponse()

    async def SubmitTasks(self, request: pb.SubmitTasksRequest, context: Context) -> pb.SubmitTasksResponse:
        quotas = self._submitted
        validation.check_submission(request, task_bytes_max=quotas.task_bytes_max)
        self._mesh.check_tasks(request.tasks)
        driver = await self._runs.get(request.run)
        if request.tasks:
            validation.check_submitted_scorers(request, await self._outgoing.reward_names(request.run))
        limits = i.SubmissionLimits(
            total_max=quotas.tasks_max, waiting_max=quotas.open_max, waiting_bytes_max=quotas.open_bytes_max
        )
        random = self._ids.new()
        submitted = await driver.submit(lambda ticket: translate.submit_tasks(ticket, request, random, limits))
        return encode(submitted, pb.SubmitTasksResponse)

    async def OpenEpisode(self, request: pb.OpenEpisodeRequest, context: Context) -> pb.OpenEpisodeResponse:
        validation.check_opening(request)
        wait_s = translate.wait_s(request.wait_s, context.time_remaining() or self._deadline_s)
        driver = await self._runs.get(request.run)
        for variant in await driver.read(lambda core, _: core.state.the_spec.variants):
            if variant.agent:
                self._mesh.check_application(variant.agent)
        known = await driver.read(lambda core, _: application_episodes.is_known(core.state, request.key, request.index))
        if request.HasField("task") or not known:
            task = translate.application_task(request)
            task.agent = self._mesh.application_agent(task.agent)
            await self.SubmitTasks(pb.SubmitTasksRequest(run=request.run, tasks=[task]), context)
        return await self._applications.open(
            driver, request.key, request.index, wait_s, lambda task: self._mesh.check_application(task.agent)
        )

    async def FinishEpisode(self, request: pb.FinishEpisodeRequest, context: Context) -> pb.FinishEpisodeResponse:
        validation.check_finish(request)
        wait_s = translate.wait_s(translate.WAIT_S_MAX, context.time_remaining() or self._deadline_s)
        driver = await self._runs.get(request.run)
        if request.rewards:
            validation.check_declared(request.rewards, await self._outgoing.environment_rewards(request.run))
        return await self._applications.finish(driver, request.lease_id, dict(request.rewards), wait_s)

    async def SubmitSamples(self, request: pb.SubmitSamplesRequest, context: Context) -> pb.SubmitSamplesResponse:
        digest, quotas = self._mesh.tokenizer_digest, self._samples
        sample_submissions.check(request, task_bytes_max=self._submitted.task_bytes_max, tokenizer_digest=digest)
        self._mesh.check_tasks(request.tasks, by_agent=False)
        driver = await self._runs.get(request.run)
        validation.check_submitted_scorers(request, await self._outgoing.reward_names(request.run))
        if not self._keeper.fleet.knows(PROTOCOL):
            raise NotReady(
                f"a node has a protocol below {PROTOCOL}, which does not know submitted samples; upgrade all nodes "
                "(`rollmesh status` lists them), then submit again"
            )
        limits = i.SubmissionLimits(
            total_max=quotas.groups_max, waiting_max=quotas.waiting_max, waiting_bytes_max=quotas.waiting_bytes_max
        )
        random = self._ids.new()
        submitted = await driver.submit(lambda ticket: sample_submissions.to_input(ticket, request, random, limits))
        return encode(submitted, pb.SubmitSamplesResponse)

    async def FetchSamples(
        self, request: pb.FetchSamplesRequest, context: Context
    ) -> AsyncIterator[pb.FetchSamplesResponse]:
        raise Unimplemented("the coordinator stores no payloads; call the gateway")
        yield  # makes it a stream

    async def PrefetchSamples(
        self, request: pb.PrefetchSamplesRequest, context: Context
    ) -> AsyncIterator[pb.PrefetchSamplesResponse]:
        raise Unimplemented("the coordinator stores no payloads; call the gateway")
        yield  # makes it a stream

    async def StreamSamples(
        self, request: pb.StreamSamplesRequest, context: Context
    ) -> AsyncIterator[pb.StreamSamplesResponse]:
        raise Unimplemented("the coordinator stores no payloads; call the gateway")
        yield  # makes it a stream

    async def WatchRun(self, request: pb.WatchRunRequest, context: Context) -> AsyncIterator[pb.WatchRunResponse]:
        validation.check_run(request.run)
        driver = await self._runs.get(request.run)
        read_state = self._reader(driver)

        def read(core: Core, head: LedgerHead) -> pb.WatchRunResponse:
            state = self._with_nodes(read_state(core, head))
            command = pb.TRAINER_COMMAND_STOP if state.ended else pb.TRAINER_COMMAND_UNSPECIFIED
            return pb.WatchRunResponse(state=state, command=command)

        async for response in driver.watch(read, is_shared=True):
            yield response

    async def GetRun(self, request: pb.GetRunRequest, context: Context) -> pb.GetRunResponse:
        validation.check_run(request.run)
        return pb.GetRunResponse(state=self._with_nodes(await self._state(request.run)))

    async def _state(self, run: str) -> pb.RunState:
        """Return the stored state. The state of an ended run is read once, because each call would recover the run."""
        ended, state = self._runs.ended.get(run), self._final.get(run)
        if ended is None or state is None or state.ledger_position != ended.position:
            driver = await self._runs.get(run)
            state = await driver.read(self._reader(driver))
            if state.ended:
                self._final[run] = state
        found = pb.RunState()
        found.CopyFrom(state)
        return found

    def _reader(self, driver: RunDriver) -> Callable[[Core, LedgerHead], pb.RunState]:
        """Return a function that reads the state of a run with its wait chain."""

        def read(core: Core, head: LedgerHead) -> pb.RunState:
            if core.state.spec is None:
                raise UnknownRun("the run has streams but no RunCreated; call CreateRun again")
            state = run_state(core, head)
            links = read_chain(core, self._keeper.fleet, self._clock, driver.last_error)
            state.chain.extend(pb.Wait(who=link.who, what=link.what) for link in links)
            state.idle_s = 0.0 if core.state.ended else core.idle_s(self._clock.monotonic_s())
            return state

        return read

    def _with_nodes(self, state: pb.RunState) -> pb.RunState:
        """Add what only the fleet knows, because it is not in the ledger."""
        if not state.ended:
            state.waiting.update(self._keeper.waiting())
        state.weights_address = next(iter(self._keeper.addresses(NodeKind.DEPOT, state.run)), "")
        return state

    async def StopRun(self, request: pb.StopRunRequest, context: Context) -> pb.StopRunResponse:
        validation.check_run(request.run)
        validation.check_text("reason", request.reason)
        driver = await self._runs.get(request.run)
        await driver.submit(lambda ticket: m.StopRun(ticket=ticket, reason=request.reason))
        return pb.StopRunResponse()

    async def DeleteRun(self, request: pb.DeleteRunRequest, context: Context) -> pb.DeleteRunResponse:
        await self._runs.delete(request.run, self._outgoing.forget_run)
        self._final.pop(request.run, None)
        return pb.DeleteRunResponse()

    async def ListDead(self, request: pb.ListDeadRequest, context: Context) -> pb.ListDeadResponse:
        validation.check_run(request.run)
        driver = await self._runs.get(request.run)
        letters = await self._dead.list(driver, after=request.after, num_max=request.num_max)
        return pb.ListDeadResponse(letters=letters)

    async def ReplayDead(self, request: pb.ReplayDeadRequest, context: Context) -> pb.ReplayDeadResponse:
        validation.check_run(request.run)
        driver = await self._runs.get(request.run)
        return pb.ReplayDeadResponse(dead_ids=await self._dead.replay(driver, request.dead_ids))


def _attached(
    request: pb.AttachTrainerRequest, attached: i.Attached, spec: RunSpec, depot: str
) -> pb.AttachTrainerResponse:
    response = pb.AttachTrainerResponse(
        trainer_epoch=attached.trainer_epoch,
        next_update=attached.next_update,
        incarnation=attached.incarnation,
        resolution=pb.AttachResolution.ValueType(attached.resolution),
        lease_s=spec.batch_lease_s,
        weights_address=depot,
        rolled_back_to=request.last_update if attached.resolution is m.AttachResolution.ROLLED_BACK else 0,
    )
    encode_into(spec, response.spec)
    return response

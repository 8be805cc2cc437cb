"""`Client` and `Run`: from the address of a gateway to a `Trainer`."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from rollmesh.client.calls import GatewayCalls, RunCalls
from rollmesh.client.episode import OPEN_WAIT_S, OpenEpisode, finish, opened
from rollmesh.client.trainer import Attachment, Trainer, disposed_samples, outcome_of
from rollmesh.shared.clock import Clock, SystemClock
from rollmesh.shared.errors import MeshError, NotReady, SampleQuota, TaskQuota, field_error
from rollmesh.shared.net.retry import RetryConfig
from rollmesh.shared.rpc.access import Access, Tls
from rollmesh.v1 import events_pb2, run_pb2, types_pb2

SUBMIT_TASKS = 1024
"""Number of tasks in a call of SubmitTasks, as its proto allows."""
SUBMIT_EPISODES = 1024
"""Number of episodes in a call of SubmitSamples, as its proto allows."""
SUBMIT_BYTES = 1 << 20
"""Size of the tasks in a call, in bytes, unless it is one larger task. The proto allows 2 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAddress:
    """Names one trainer of one run, for components that open a `Client` themselves."""

    address: str
    """host:port of the gateway."""
    access: Access
    run: str
    policy: str = "main"
    learner: str = "main"
    holder: str = ""
    """Host and process, for messages."""
    payloads: Path | None = None
    """Folder of the payload files, on the host that has them."""


class Client:
    """A mesh, reached through its gateway. An async context; its runs and trainers end with it."""

    def __init__(
        self,
        address: str,
        *,
        token: str,
        tls: Tls | None = None,
        retry: RetryConfig | None = None,
        clock: Clock | None = None,
        payloads: Path | None = None,
    ) -> None:
        """`tls` is for gateways on other machines. Connects on the first call. ConfigError for unreadable TLS files.

        `payloads` is the folder `payloads` of the run folder: a trainer on its host reads the episodes there, and not
        from the gateway.
        """
        self._calls = GatewayCalls(
            address, Access(token, tls), retry or RetryConfig(), clock or SystemClock(), payloads
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._calls.close()

    async def create_run(self, spec: events_pb2.RunSpec) -> Run:
        """Create a run, or continue the one with the same spec. Raises `InvalidSpec` naming the field, `RunExists`."""
        run = self.run(spec.run, policy=spec.policy or "main", learner=spec.learner or "main")
        await run.ask("CreateRun", run_pb2.CreateRunRequest(spec=spec))
        return run

    def run(self, name: str, *, policy: str = "main", learner: str = "main") -> Run:
        """Return a run by name. If it does not exist, the first call raises `UnknownRun`."""
        return Run(self._calls, name, policy, learner)


class Run(RunCalls):
    """One run of a mesh, created by `Client.run`."""

    async def attach(
        self,
        *,
        last_update: int = 0,
        digest: str = "",
        keeps_no_checkpoints: bool = False,
        holder: str = "",
        dropped: Mapping[str, str] | None = None,
        applied: bool = True,
        prefetch_bytes_max: int = 0,
    ) -> Trainer:
        """Attach as the only trainer of the run, with the state of the caller's checkpoint: its last update and the
        digest after it.

        `dropped` (sample id -> reason) and `applied` are those of the commit of `last_update`, whose reply may be lost.
        Without them an update that dropped samples or was skipped cannot be rolled forward. Use the trainer as a
        context.

        With `prefetch_bytes_max`, up to so many bytes of payloads are loaded while the trainer waits or trains, so that
        `fetch` finds them.

        Raises `UnknownRun`, `DigestMismatch` (the checkpoint belongs to another history), `UnknownUpdate`.
        """
        request = run_pb2.AttachTrainerRequest(
            **self.names(),
            last_update=last_update,
            digest=digest,
            holder=holder,
            keeps_no_checkpoints=keeps_no_checkpoints,
            samples=disposed_samples(dropped or {}),
            outcome=outcome_of(applied),
        )

        async def attach() -> run_pb2.AttachTrainerResponse:
            reply: run_pb2.AttachTrainerResponse = await self.gateway.once("AttachTrainer", request)
            if not reply.weights_address:
                # Without a depot the trainer cannot publish weights, hence cannot lease a batch.
                raise NotReady(f"run {self.name} has no depot yet; start one (rollmesh serve depot)")
            return reply

        reply = await self.retry(attach)
        self.lease_s = reply.lease_s
        attached = Attachment(
            trainer_epoch=reply.trainer_epoch,
            next_update=reply.next_update,
            incarnation=reply.incarnation,
            resolution=run_pb2.AttachResolution.Name(reply.resolution).removeprefix("ATTACH_RESOLUTION_"),
            lease_s=reply.lease_s,
            spec=reply.spec,
        )
        return Trainer(
            self, attached, digest=digest, depot=reply.weights_address, prefetch_bytes_max=prefetch_bytes_max
        )

    async def submit_tasks(
        self,
        tasks: Iterable[types_pb2.Task],
        answer_keys: Iterable[types_pb2.AnswerKey] = (),
        *,
        finish: bool = False,
    ) -> run_pb2.SubmittedTasks:
        """Submit tasks to a run with `submitted_tasks`, in as many calls as they need, and return the numbers of all
        tasks of the run. With `finish` no further tasks may follow, and the run ends when these are trained.

        When it returns, the tasks survive a crash of every service. After an error, call it again with the same tasks:
        those that were stored are not added twice. While too many tasks wait for admission, it waits, for the limit of
        retries. Raises `InvalidInput` (the message names the task and the field), `TaskConflict`, `TasksNotAccepted`,
        `TaskQuota`, `PayloadTooLarge`.
        """
        tasks = list(tasks)
        keys = _keys_by_task(answer_keys, {task.task_id for task in tasks})
        parts = [run_pb2.SubmitTasksRequest(run=self.name)]
        num_bytes = 0
        for task in tasks:
            key = keys.pop(task.task_id, None)
            size = task.ByteSize() + (key.ByteSize() if key is not None else 0)
            if parts[-1].tasks and (num_bytes + size > SUBMIT_BYTES or len(parts[-1].tasks) == SUBMIT_TASKS):
                parts.append(run_pb2.SubmitTasksRequest(run=self.name))
                num_bytes = 0
            num_bytes += size
            parts[-1].tasks.append(task)
            if key is not None:
                parts[-1].answer_keys.append(key)
        parts[-1].finish = finish
        reply = run_pb2.SubmitTasksResponse()
        for part in parts:
            reply = await self._submit(part)
        return reply.submitted

    async def submit_samples(
        self,
        episodes: Iterable[types_pb2.Episode],
        tasks: Iterable[types_pb2.Task],
        *,
        source: types_pb2.SegmentSource.ValueType,
        answer_keys: Iterable[types_pb2.AnswerKey] = (),
        tokenizer_digest: str = "",
        provenance: events_pb2.Provenance | None = None,
    ) -> run_pb2.SubmittedSamples:
        """Submit finished episodes of another source to a run with an entry of `foreign` for it, in as many calls as
        they need, and return the account of the source. `SubmitSamplesRequest` describes both forms of an episode. The
        episodes with one `key.group` become one group of the run.

        When it returns, they survive a crash of every service. After an error, call it again with the same episodes:
        groups that were stored are not added twice. While too many groups wait for admission, it waits, for the limit
        of retries. Raises `InvalidInput` (the message names the episode and the field), `SampleConflict`,
        `SamplesNotAccepted`, `TokenizerMismatch`, `SampleQuota`, `PayloadTooLarge`.
        """
        given = list(tasks)
        _check_different("tasks.task_id", [task.task_id for task in given])
        known = {task.task_id: task for task in given}
        keys = _keys_by_task(answer_keys, known)
        groups: dict[str, list[types_pb2.Episode]] = {}
        unused = set(known)
        for episode in episodes:
            groups.setdefault(episode.key.group, []).append(episode)
            unused.discard(episode.key.task)
        if unused:
            raise field_error("tasks", "be tasks of the episodes", min(unused))

        def request(of: list[list[types_pb2.Episode]]) -> run_pb2.SubmitSamplesRequest:
            names = dict.fromkeys(group[0].key.task for group in of)
            return run_pb2.SubmitSamplesRequest(
                run=self.name,
                source=source,
                tokenizer_digest=tokenizer_digest,
                provenance=provenance,
                episodes=[episode for group in of for episode in group],
                tasks=[known[name] for name in names if name in known],
                answer_keys=[keys[name] for name in names if name in keys],
            )

        async def submit(of: list[list[types_pb2.Episode]]) -> run_pb2.SubmitSamplesResponse:
            """Submit groups, by halves if the mesh has a smaller quota for a call."""
            try:
                reply: run_pb2.SubmitSamplesResponse = await self.ask("SubmitSamples", request(of))
            except SampleQuota as error:
                if "groups_per_call" not in error.metadata or len(of) < 2:
                    raise
            else:
                return reply
            half = len(of) // 2
            await submit(of[:half])
            return await submit(of[half:])

        reply = run_pb2.SubmitSamplesResponse()
        for part in _calls_of(groups.values(), known, keys) or [[]]:
            reply = await submit(part)
        return reply.submitted

    @asynccontextmanager
    async def episode(
        self,
        key: str,
        *,
        index: int = 0,
        task: types_pb2.Task | None = None,
        messages: Iterable[types_pb2.Message] = (),
    ) -> AsyncIterator[OpenEpisode]:
        """Open an episode of live traffic in a run with `submitted_tasks`, whose agent is `application`: the requests
        to its `base_url` with its `api_key` become samples.

        `key` names it in the run, and `index` in a group of several. `task` and `messages` describe it; without both,
        it has an empty prompt, or those of a submitted task of this id. The end of the context does not end the
        episode, because its rewards may come later; an exception drops it. Raises `EpisodeOver`, `EpisodesNotServed`,
        and as `submit_tasks`; `NotReady` if no worker serves it within the limit of retries.
        """
        request = run_pb2.OpenEpisodeRequest(run=self.name, key=key, index=index, task=task, wait_s=OPEN_WAIT_S)
        request.task.messages.extend(messages)
        if task is None and not request.task.messages:
            request.ClearField("task")
        found = await opened(self, request)
        try:
            yield found
        except Exception:  # whatever the application raises; it gets it back
            with suppress(MeshError):
                await found.finish({})
            raise

    async def finish_episode(self, lease_id: str, rewards: Mapping[str, float]) -> list[str]:
        """End an episode with the rewards that only its application knows, or drop it with none; return the ids of its
        samples. When it returns, the ledger has the end, so call it again after an error. Raises `EpisodeLost` if its
        worker was lost (open it again), `EpisodeOver`, `EpisodeConflict`, `UnknownEpisode`, `InvalidInput`."""
        return await finish(self, lease_id, rewards)

    async def _submit(self, part: run_pb2.SubmitTasksRequest) -> run_pb2.SubmitTasksResponse:
        """Submit a part, by halves if the mesh has a smaller quota for a call."""
        try:
            reply: run_pb2.SubmitTasksResponse = await self.ask("SubmitTasks", part)
        except TaskQuota as error:
            if "tasks_per_call" not in error.metadata or len(part.tasks) == 1:
                raise
        else:
            return reply
        half = len(part.tasks) // 2
        first, rest = run_pb2.SubmitTasksRequest(run=part.run), run_pb2.SubmitTasksRequest(run=part.run)
        first.tasks.extend(part.tasks[:half])
        rest.tasks.extend(part.tasks[half:])
        of_first = {task.task_id for task in first.tasks}
        for key in part.answer_keys:
            (first if key.task_id in of_first else rest).answer_keys.append(key)
        rest.finish = part.finish
        await self._submit(first)
        return await self._submit(rest)

    async def state(self) -> run_pb2.RunState:
        """Return the current state: sample counts, evaluations, waiting components and their reasons."""
        return await self.retry(self.state_now)

    async def watch(self) -> AsyncGenerator[run_pb2.WatchRunResponse]:
        """Yield states and commands when they arrive. Raise when the stream breaks; then call it again."""
        async with aclosing(self.gateway.stream("WatchRun", run_pb2.WatchRunRequest(run=self.name))) as messages:
            async for message in messages:
                yield message

    async def samples(self, cursor: str = "") -> AsyncGenerator[run_pb2.StreamSamplesResponse]:
        """Yield scored episodes of a run that exports, after the one at `cursor`. Raises `HasLearner` for any other
        run."""
        request = run_pb2.StreamSamplesRequest(run=self.name, cursor=cursor)
        async with aclosing(self.gateway.stream("StreamSamples", request)) as messages:
            async for message in messages:
                yield message

    async def stop(self, reason: str = "") -> None:
        """Stop the run. The coordinator does not admit new groups and sends trainers the command to stop."""
        request = run_pb2.StopRunRequest(run=self.name, reason=reason)
        await self.ask("StopRun", request)


def _keys_by_task(answer_keys: Iterable[types_pb2.AnswerKey], names: Collection[str]) -> dict[str, types_pb2.AnswerKey]:
    """Return answer keys by task. Raises InvalidInput for two keys of a task, and for a key of none of `names`."""
    given = list(answer_keys)
    _check_different("answer_keys.task_id", [key.task_id for key in given])
    if unknown := [key.task_id for key in given if key.task_id not in names]:
        raise field_error("answer_keys.task_id", "name one of the tasks", unknown[0])
    return {key.task_id: key for key in given}


def _check_different(field: str, names: Iterable[str]) -> None:
    if twice := [name for name, num in Counter(names).items() if num > 1]:
        raise field_error(field, "be different in each entry", twice[0])


def _calls_of(
    groups: Iterable[list[types_pb2.Episode]],
    tasks: Mapping[str, types_pb2.Task],
    keys: Mapping[str, types_pb2.AnswerKey],
) -> list[list[list[types_pb2.Episode]]]:
    """Divide groups into calls. The ledger has the task of each group, and an answer key once per call."""
    calls: list[list[list[types_pb2.Episode]]] = []
    num_bytes = num = 0
    with_key: set[str] = set()
    for group in groups:
        name = group[0].key.task
        of_key = keys[name].ByteSize() if name in keys else 0
        size = sum(one.ByteSize() for one in group) + (tasks[name].ByteSize() if name in tasks else 0)
        total = num_bytes + size + (0 if name in with_key else of_key)
        if not calls or total > SUBMIT_BYTES or num + len(group) > SUBMIT_EPISODES:
            calls.append([])
            num, with_key = 0, set()
            total = size + of_key
        num_bytes, num = total, num + len(group)
        with_key.add(name)
        calls[-1].append(group)
    return calls

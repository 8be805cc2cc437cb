"""In-process fakes of the services that an episode uses, to run an agent or the worker without a mesh.

    mesh = LocalMesh(script=lambda text: "<answer>4</answer><|end|>")
    report = await mesh.runner(MyAgent()).run(lease(messages=["2+2"]))
    episode = mesh.samples.episodes[report.payload.sequence - 1]

They count open sessions and requests, so that a test can assert that all are closed. A call that enters a `Gate` whose
`held` is set waits there. The fakes are deterministic: the text of the model is a function of the text before it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import sys
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from rollmesh.services.reward.item import judged_path
from rollmesh.services.rollout.agent import Agent
from rollmesh.services.rollout.agents.tool_calling import ToolCallingAgent
from rollmesh.services.rollout.chat_format import ChatFormat, ToolSchema
from rollmesh.services.rollout.config import FormatConfig, RolloutConfig
from rollmesh.services.rollout.episode import EpisodeParts, EpisodeRunner
from rollmesh.services.rollout.openai.server import OpenAiServer
from rollmesh.services.rollout.ports import ApplicationPort, SandboxSession
from rollmesh.services.rollout.progress import WorkerProgress
from rollmesh.services.rollout.recorder import mix64
from rollmesh.services.rollout.stages import Stages
from rollmesh.services.rollout.worker import RolloutWorker
from rollmesh.shared.clients.generated import ScoredTokens, Target
from rollmesh.shared.clients.sandbox import ExecOutcome, ExecResult, RemoteSnapshot
from rollmesh.shared.clock import Clock, SystemClock
from rollmesh.shared.codec.plans import encode_variant
from rollmesh.shared.codec.trajectory import decode_segment, episode_from_bytes
from rollmesh.shared.domain.extras import encode_extras
from rollmesh.shared.domain.outputs import array_names
from rollmesh.shared.domain.plans import Variant
from rollmesh.shared.domain.trajectory import (
    EndpointUse,
    Episode,
    EpisodeKey,
    FinishReason,
    IntArray,
    Message,
    Reward,
    SamplingParams,
    Segment,
    sampled_segment,
)
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.endpoints.client import Endpoints
from rollmesh.shared.errors import MeshError, StaleWeights
from rollmesh.v1 import coordinator_pb2, reward_pb2, types_pb2

_TAG = re.compile(r"<\|\w+\|>|</?\w+>")
_DEMO_TAGS = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<tool_call>", "</tool_call>")
_FIRST_TAG = 2**20


DEMO_FORMAT = ChatFormat(
    turn_ends=("<|end|>",),
    tool_call_start="<tool_call>",
    tool_call_end="</tool_call>",
    tool_call_body="bare",
    observation="<|tool|>{text}<|end|><|assistant|>",
)
"""Format of the demo's chat template."""


class CharTokenizer:
    """Encodes each character, and each tag such as `<|end|>` or `</answer>`, as one id, in order of first use."""

    def __init__(self, words: FormatConfig | None = None) -> None:
        self._tags: dict[str, int] = {}
        changes = {
            name: value for name, value in msgspec.structs.asdict(words or FormatConfig()).items() if value is not None
        }
        turn_end = changes.pop("turn_end", "<|end|>")
        self.format = dataclasses.replace(DEMO_FORMAT, turn_ends=(turn_end,), **changes)

    def encode_text(self, text: str) -> IntArray:
        return np.asarray([ord(char) for char in text], dtype=np.int32)

    def encode_markup(self, text: str) -> IntArray:
        ids: list[int] = []
        end = 0
        for match in _TAG.finditer(text):
            ids += [ord(char) for char in text[end : match.start()]]
            ids.append(self._tags.setdefault(match.group(), _FIRST_TAG + len(self._tags)))
            end = match.end()
        return np.asarray([*ids, *(ord(char) for char in text[end:])], dtype=np.int32)

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> IntArray:
        return self.encode_markup(self.render([{"role": m.role, "content": m.content} for m in messages], tools))

    @property
    def tags(self) -> Mapping[str, bool]:
        return dict.fromkeys((*_DEMO_TAGS, *self._tags), True)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSchema], *, prompt: bool = True) -> str:
        names = [tool["function"]["name"] for tool in tools]
        system = f"<|system|>{' '.join(names)}<|end|>" if names else ""
        return f"{system}{''.join(map(_written_message, messages))}{'<|assistant|>' if prompt else ''}"

    @property
    def num_ids(self) -> int:
        return _FIRST_TAG + len(self._tags)

    def encode_rendered(self, text: str, guard: str) -> IntArray:
        parts = re.split(f"({_TAG.pattern})", text)
        encoders = (self.encode_text, self.encode_markup)
        return np.concatenate([encoders[i % 2](part.replace(guard, "")) for i, part in enumerate(parts)])

    def decode(self, token_ids: IntArray) -> str:
        names = {number: tag for tag, number in self._tags.items()}
        return "".join(names[i] if i >= _FIRST_TAG else chr(i) for i in token_ids.tolist())

    def token_bytes(self, token_id: int) -> bytes:
        return self.decode(np.asarray([token_id], dtype=np.int32)).encode()

    def token_id(self, token: str) -> int | None:
        ids = self.encode_markup(token)
        return int(ids[0]) if ids.size == 1 else None


def _written_message(message: Mapping[str, Any]) -> str:
    given = (call["function"]["arguments"] for call in message.get("tool_calls", ()))
    calls = (next(iter(arguments.values()), "") if isinstance(arguments, dict) else arguments for arguments in given)
    called = "".join(f"<tool_call>{text}</tool_call>" for text in calls)
    return f"<|{message['role']}|>{message['content']}{called}<|end|>"


class Gate:
    """Counts the calls inside. While `held` is set, they wait. A `failure` is raised at each entry."""

    def __init__(self) -> None:
        self.num_inside = 0
        self.num_entered = 0
        self.failure: MeshError | None = None
        self.passes_max = sys.maxsize
        """Number of entries after which `held` is set."""
        self._open = asyncio.Event()
        self._open.set()

    @property
    def held(self) -> bool:
        return not self._open.is_set()

    @held.setter
    def held(self, value: bool) -> None:
        (self._open.clear if value else self._open.set)()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.num_inside += 1
        self.num_entered += 1
        try:
            yield
        finally:
            self.num_inside -= 1

    async def enter(self) -> None:
        with self._counted():
            if self.failure is not None:
                raise self.failure
            if self.num_entered > self.passes_max:
                self.held = True
            await asyncio.sleep(0)
            await self._open.wait()


class ScriptedGenerator:
    """A model whose next text is `script` of the text before it. Each "?" in it becomes a drawn digit.

    Each version of `steps` samples one token, in order; the last one samples the rest. All log-probs are -0.5. `column`
    returns the values of a further array for given tokens.
    """

    def __init__(
        self,
        tokenizer: CharTokenizer,
        script: Callable[[str], str],
        steps: Sequence[int] = (0,),
        outputs: Sequence[str] = (),
        column: Callable[[str, str], float] = lambda array, text: 0.0,
    ) -> None:
        self._tokenizer = tokenizer
        self._script = script
        self._outputs = tuple(outputs)
        self._column = column
        self.steps = tuple(steps)
        self.gate = Gate()
        self.asked: list[tuple[IntArray, SamplingParams, Target]] = []
        self.scored: list[tuple[IntArray, Target]] = []

    def open(
        self, token_ids: IntArray, params: SamplingParams, *, target: Target, session: str, key: EpisodeKey
    ) -> ScriptedGeneration:
        self.asked.append((token_ids, params, target))
        text = self._script(self._tokenizer.decode(token_ids))
        while "?" in text:
            position = token_ids.size + text.index("?")
            text = text.replace("?", str(mix64(params.seed + position) % 10), 1)
        said = self._tokenizer.encode_markup(text)
        cut = said[: params.max_tokens]
        finish = FinishReason.STOP if cut.size == said.size else FinishReason.LENGTH
        return ScriptedGeneration(self.gate, list(self._pieces(cut)), finish)

    async def score(
        self, sequences: Sequence[IntArray], *, target: Target, outputs: Sequence[str] = ()
    ) -> list[ScoredTokens]:
        self.scored += [(token_ids, target) for token_ids in sequences]
        await self.gate.enter()
        version = PolicyVersion(policy="main", step=self.steps[-1])
        if not target.admits(version):
            raise StaleWeights(f"the script serves {version}, not {target}", step=target.step)
        return [
            ScoredTokens(
                logprobs=np.asarray([0.0, *[-0.5] * (row.size - 1)], dtype=np.float32),
                version=version,
                arrays=self._arrays(row, outputs),
            )
            for row in sequences
        ]

    def _arrays(self, token_ids: IntArray, outputs: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        texts = [self._tokenizer.decode(token_ids[i : i + 1]) for i in range(token_ids.size)]
        names = array_names(outputs)
        return {name: np.asarray([self._column(name, text) for text in texts], dtype=np.float32) for name in names}

    def _pieces(self, token_ids: IntArray) -> Iterator[Segment]:
        last = len(self.steps) - 1
        for number, step in enumerate(self.steps):
            part = token_ids[number:] if number == last else token_ids[number : number + 1]
            if part.size:
                logprobs = np.full(part.shape, -0.5, dtype=np.float32)
                version = PolicyVersion(policy="main", step=step)
                arrays = self._arrays(part, self._outputs)
                yield sampled_segment(
                    part, logprobs, version, logprobs_model=logprobs, kv_step_oldest=step, arrays=arrays
                )


class ScriptedGeneration:
    """Returns its segments one by one. Each of them passes the gate."""

    def __init__(self, gate: Gate, pieces: list[Segment], finish: FinishReason) -> None:
        self.finish = FinishReason.UNFINISHED
        self._gate = gate
        self._pieces = pieces
        self._end = finish

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Segment:
        if not self._pieces:
            self.finish = self._end
            raise StopAsyncIteration
        await self._gate.enter()
        return self._pieces.pop(0)


class LocalSandbox:
    """Calls functions of this process by name, without isolation. A result that is not a str must be an
    `ExecResult`."""

    def __init__(self, functions: Mapping[str, Callable[[str], str | ExecResult]]) -> None:
        self._functions = functions
        self.opening = Gate()
        self.calling = Gate()
        self.num_sessions = 0
        self.num_opened = 0
        self.session_ids: list[str] = []

    @asynccontextmanager
    async def session(
        self, profile: str, *, session_id: str, owner: str = "", ttl_s: float = 0.0, tenant: str = ""
    ) -> AsyncIterator[SandboxSession]:
        await self.opening.enter()
        self.num_sessions += 1
        self.num_opened += 1
        self.session_ids.append(session_id)
        try:
            yield _LocalSession(self)
        finally:
            self.num_sessions -= 1

    @asynccontextmanager
    async def fork(
        self, snapshot: RemoteSnapshot, *, session_id: str, owner: str = "", ttl_s: float = 0.0
    ) -> AsyncIterator[SandboxSession]:
        """Open another session. The functions have no state to copy."""
        async with self.session("", session_id=session_id) as session:
            yield session

    async def call_stateless(
        self, profile: str, function: str, *arguments: str, tenant: str, call_key: str = "", wall_s: float = 0.0
    ) -> ExecResult:
        return await self.call(function, *arguments)

    async def drop(self, snapshot: RemoteSnapshot) -> None:
        """Do nothing, because snapshots have no state."""

    async def call(self, function: str, text: str) -> ExecResult:
        await self.calling.enter()
        result = self._functions[function](text)
        return result if isinstance(result, ExecResult) else ExecResult(outcome=ExecOutcome.OK, result=result)


class _LocalSession:
    def __init__(self, sandbox: LocalSandbox) -> None:
        self._sandbox = sandbox

    async def call(self, function: str, *arguments: str, wall_s: float = 0.0) -> ExecResult:
        return await self._sandbox.call(function, *arguments)

    async def run(
        self, code: str, *, language: str = "python", arguments: Sequence[str] = (), wall_s: float = 0.0
    ) -> ExecResult:
        return await self._sandbox.call("run", code)

    async def snapshot(self, *, ttl_s: float = 0.0) -> RemoteSnapshot:
        return RemoteSnapshot(snapshot_id="", address="", num_bytes=0, lost=())


class FixedScorer:
    """Scores every sample with `rewards` of the last message of its path."""

    def __init__(self, rewards: Callable[[str], tuple[Reward, ...]]) -> None:
        self._rewards = rewards
        self.gate = Gate()
        self.items: list[reward_pb2.ScoreItem] = []
        self.read: Collection[str] = ()
        """Arrays that the worker sends."""

    async def columns(self) -> Collection[str]:
        return self.read

    async def score(
        self, run: str, item: reward_pb2.ScoreItem, uses: list[EndpointUse] | None = None
    ) -> list[tuple[Reward, ...]]:
        self.items.append(item)
        await self.gate.enter()
        segments = [decode_segment(segment) for segment in item.segments]
        views = [judged_path(segments, sample.leaf)[1] for sample in item.samples]
        return [self._rewards(view[-1].content) for view in views]


class FixedPrivateData:
    """Gives each task the same private extras, and stores the requests: task and names."""

    def __init__(self, extras: Mapping[str, object]) -> None:
        self._extras = extras
        self.gate = Gate()
        self.asked: list[tuple[str, tuple[str, ...]]] = []

    async def private_extras(self, *, run: str, split: str, task_id: str, names: Sequence[str]) -> Mapping[str, object]:
        self.asked.append((task_id, tuple(names)))
        await self.gate.enter()
        return {name: value for name, value in self._extras.items() if name in names}


class ListLog:
    """A sample stream that is stored in a list."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []
        self.gate = Gate()

    @property
    def episodes(self) -> list[Episode]:
        return [episode_from_bytes(payload) for payload in self.payloads]

    async def append(self, run: str, payload: bytes, *, message_id: str) -> int:
        await self.gate.enter()
        self.payloads.append(payload)
        return len(self.payloads)


class ListCoordinator:
    """Grants `leases` in order and stores the reports. If `away` is set, every request fails with it."""

    def __init__(self, leases: Sequence[coordinator_pb2.EpisodeLease], clock: Clock) -> None:
        self._clock = clock
        self.waiting = list(leases)
        self.live: dict[str, coordinator_pb2.EpisodeLease] = {}
        self.gone: set[str] = set()
        self.reports: list[coordinator_pb2.EpisodeReport] = []
        self.asked_for: list[int] = []
        self.renewals: list[list[str]] = []
        self.report_sizes: list[int] = []
        self.away: MeshError | None = None
        self.draining: MeshError | None = None

    async def acquire(self, num_max: int, wait_s: float) -> coordinator_pb2.AcquireRolloutsResponse:
        self._check()
        if self.draining is not None:
            raise self.draining
        self.asked_for.append(num_max)
        if not self.waiting:
            await self._clock.sleep(wait_s)
            return coordinator_pb2.AcquireRolloutsResponse(waiting_for="admission full")
        given, self.waiting = self.waiting[:num_max], self.waiting[num_max:]
        self.live.update((lease.lease_id, lease) for lease in given)
        return coordinator_pb2.AcquireRolloutsResponse(leases=given)

    async def renew(self, lease_ids: Sequence[str]) -> coordinator_pb2.RenewLeasesResponse:
        self._check()
        self.renewals.append(list(lease_ids))
        gone = [lease_id for lease_id in lease_ids if lease_id in self.gone]
        for lease_id in gone:
            self.live.pop(lease_id, None)
        return coordinator_pb2.RenewLeasesResponse(gone=gone)

    async def report(self, reports: Sequence[coordinator_pb2.EpisodeReport]) -> Sequence[str]:
        self._check()
        self.report_sizes.append(len(reports))
        results = []
        for report in reports:
            self.reports.append(report)
            results.append("" if self.live.pop(report.lease_id, None) is not None else "UNKNOWN_LEASE")
        return results

    def _check(self) -> None:
        if self.away is not None:
            raise self.away


def answer_reward(content: str) -> tuple[Reward, ...]:
    """Return the reward 1 for a message that contains an answer, else 0."""
    return (Reward(name="correct", value=float("<answer>" in content), scorer="answer@1"),)


@dataclass(kw_only=True)
class LocalMesh:
    """All fakes together."""

    script: Callable[[str], str]
    functions: Mapping[str, Callable[[str], str | ExecResult]] = field(default_factory=dict)
    rewards: Callable[[str], tuple[Reward, ...]] = answer_reward
    steps: Sequence[int] = (0,)
    column: Callable[[str, str], float] = lambda array, text: 0.0
    """Value of an array of `config.outputs`, by its name and the text of a token."""
    leases: Sequence[coordinator_pb2.EpisodeLease] = ()
    config: RolloutConfig = field(default_factory=RolloutConfig)
    clock: Clock = field(default_factory=SystemClock)
    endpoints: Endpoints = field(default_factory=lambda: Endpoints({}))
    private_extras: Mapping[str, object] = field(default_factory=dict)
    """Private extras of each task."""
    applications: ApplicationPort | None = None
    """Applications that open episodes."""

    def __post_init__(self) -> None:
        self.tokenizer = CharTokenizer(self.config.format)
        self.generator = ScriptedGenerator(self.tokenizer, self.script, self.steps, self.config.outputs, self.column)
        self.sandbox = LocalSandbox(self.functions)
        self.scorer = FixedScorer(self.rewards)
        self.data = FixedPrivateData(self.private_extras)
        self.samples = ListLog()
        self.coordinator = ListCoordinator(self.leases, self.clock)
        self.progress = WorkerProgress()
        self.stages = Stages(self.config.stages, self.clock)
        self.server = OpenAiServer(self.config, self.tokenizer, self.clock)

    def runner(self, agent: Agent | None = None, agents: Mapping[str, Agent] | None = None) -> EpisodeRunner:
        """Return a runner of single episodes. `agent` is the default agent, and `agents` are those that tasks name. A
        configuration without permissions permits the private extras that they declare."""
        config, made = self.config, {"": agent or ToolCallingAgent(), **(agents or {})}
        if not config.private_extras:
            declared = {name or config.agent.name: tuple(one.private_extras) for name, one in made.items()}
            config = replace(config, private_extras=declared)
        return EpisodeRunner(
            EpisodeParts(
                config=config,
                agents=made,
                tokenizer=self.tokenizer,
                generator=self.generator,
                sandbox=self.sandbox,
                scorer=self.scorer,
                data=self.data,
                samples=self.samples,
                clock=self.clock,
                stages=self.stages,
                progress=self.progress,
                server=self.server,
                applications=self.applications,
                endpoints=self.endpoints,
            )
        )

    def worker(self, agent: Agent | None = None) -> RolloutWorker:
        """Return a worker that runs the leases of the coordinator."""
        return RolloutWorker(self.coordinator, self.runner(agent), self.progress, self.config.worker, self.clock)

    @property
    def num_open(self) -> int:
        """Number of sessions, requests and stage slots in use; 0 if all are closed."""
        gates = (self.generator.gate, self.sandbox.opening, self.sandbox.calling, self.scorer.gate, self.samples.gate)
        num_calls = sum(gate.num_inside for gate in (*gates, self.data.gate))
        return self.sandbox.num_sessions + num_calls + sum(self.stages.num_inside.values())


def lease(
    messages: Sequence[str] = ("1+2",),
    *,
    lease_id: str = "l1",
    tools: Sequence[str] = (),
    purpose: types_pb2.Purpose.ValueType = types_pb2.PURPOSE_TRAIN,
    attempt: int = 1,
    seed: int = 7,
    step_min: int = 0,
    lease_s: float = 30.0,
    labels: Mapping[str, str] | None = None,
    extras: Mapping[str, object] | None = None,
    index: int = 0,
    agent: str = "",
    variant: Variant | None = None,
) -> coordinator_pb2.EpisodeLease:
    """Return a lease of an episode whose task is a conversation of user messages. `labels`, `extras` and `agent` are
    those of the task."""
    key = types_pb2.EpisodeKey(run="r", task="t", group="g", episode=f"e-{lease_id}", attempt=attempt)
    task = types_pb2.Task(
        task_id="t",
        messages=[types_pb2.Message(role="user", content=content) for content in messages],
        tools=tools,
        labels=labels,
        extras=encode_extras(extras or {}),
        agent=agent,
    )
    return coordinator_pb2.EpisodeLease(
        lease_id=lease_id,
        key=key,
        purpose=purpose,
        task=task,
        policy="main",
        step_min=step_min,
        lease_s=lease_s,
        seed=seed,
        index=index,
        variant=encode_variant(variant) if variant is not None else None,
    )

"""The environment of an agent: it generates, calls tools and observes; the recorder stores every token.

An `Environment` is one branch of the conversation; new segments are appended at its end. `fork` creates a second branch
with the same history; `context` starts a new one with other messages. All branches of an episode share its recorder,
limits and outcome. A fork has separate tool sessions, in the state that its history produced.

Failures are permanent: an agent that catches the error of a failed node and continues does not complete the episode.
The same holds for limits. Prefixes are concatenated from recorded ids and never encoded again from text.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Protocol

import numpy as np
from msgspec.structs import replace
from opentelemetry.trace import Span

from rollmesh.services.rollout.agent_types import MODEL, LimitReached, Task, ToolResult, Turn
from rollmesh.services.rollout.chat_format import ChatFormat, ToolSchema
from rollmesh.services.rollout.config import LimitsConfig, SamplingConfig
from rollmesh.services.rollout.environment_rewards import EnvironmentRewards
from rollmesh.services.rollout.episode_trace import SERVICE
from rollmesh.services.rollout.failures import EpisodeFailed, boundary
from rollmesh.services.rollout.fault_points import RolloutFaultPoint
from rollmesh.services.rollout.metrics import SCORE_CALLS, TOOL_CALLS
from rollmesh.services.rollout.ports import Generator
from rollmesh.services.rollout.private_extras import PrivateExtras
from rollmesh.services.rollout.recorder import Recorder
from rollmesh.services.rollout.tokenizer import Tokenizer
from rollmesh.services.rollout.tools import ToolBox, shorten
from rollmesh.shared.clients.generated import ScoredTokens, Target, merged
from rollmesh.shared.clients.given_tokens import Prompt, exactly, prompt_ids, sequence
from rollmesh.shared.clock import Clock
from rollmesh.shared.codec.checks import WORD_FORM, check_tool, is_word
from rollmesh.shared.domain.plans import Variant
from rollmesh.shared.domain.trajectory import (
    ROOT,
    SAMPLED_SOURCES,
    WHOLE_SAMPLE,
    ClientChains,
    EndpointUse,
    EpisodeKey,
    FinishReason,
    IntArray,
    Message,
    Outcome,
    Purpose,
    Reward,
    Role,
    Sample,
    SamplingParams,
    Segment,
    Source,
    ToolOutcome,
)
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.endpoints.answer import EndpointAnswer, Messages
from rollmesh.shared.endpoints.client import Endpoints
from rollmesh.shared.endpoints.config import EndpointKind
from rollmesh.shared.endpoints.metering import EndpointMeter
from rollmesh.shared.errors import EngineFailed, FailedPrecondition, StaleWeights
from rollmesh.shared.process.fault_points import Hook, noop
from rollmesh.shared.telemetry import tracing
from rollmesh.shared.telemetry.metrics import count
from rollmesh.v1 import run_pb2

_ENDED = (FinishReason.STOP, FinishReason.LENGTH)


class ServedEpisode(Protocol):
    """An episode whose model is served over HTTP in the OpenAI protocol, until the context ends."""

    @property
    def base_url(self) -> str:
        """The base URL of a client, such as http://127.0.0.1:8123/v1."""
        ...

    @property
    def key(self) -> str:
        """The API key of the episode. It opens nothing else, and expires with the context."""
        ...

    @property
    def num_requests(self) -> int:
        """Number of requests for a turn so far."""
        ...

    @property
    def idle_s(self) -> float:
        """Seconds since the end of the last request, or since the beginning without one; 0 while one runs."""
        ...

    @property
    def num_turns(self) -> int:
        """Number of turns that clients got."""
        ...

    @property
    def client_chains(self) -> ClientChains:
        """The conversations of the clients so far."""
        ...

    def branch(self, reply: str = "", choice: int = 0) -> Environment:
        """Return the branch after a choice of the reply with this id, or without an id that of the only conversation.
        Raise ValueError if there is none."""
        ...

    async def wait_ended(self) -> None:
        """Wait until a limit or an infra failure has ended the episode."""
        ...

    def check(self) -> None:
        """Raise the failure or the limit that ended the episode, or the limit that rejected its last request."""
        ...


class ModelServer(Protocol):
    """The server of a worker that serves the models of its episodes."""

    def open(self, env: Environment) -> AbstractAsyncContextManager[ServedEpisode]:
        """Serve the model of an episode to the clients that have its key."""
        ...


Judge = Callable[[int, Sequence[str]], Awaitable[tuple[Reward, ...]]]
"""(last segment, names of rewards) -> the rewards of the sample that ends there."""


Announce = Callable[[run_pb2.OpenEpisodeResponse, float], Awaitable[Mapping[str, float] | None]]
"""(the served episode, longest wait in seconds) -> what its application says, see `Environment.announce`."""


@dataclass(slots=True, kw_only=True)
class EnvironmentState:
    """State that the branches of one episode share."""

    key: EpisodeKey
    task: Task
    target: Target
    generator: Generator
    tokenizer: Tokenizer
    tools: ToolBox
    clock: Clock
    sampling: SamplingConfig
    limits: LimitsConfig
    recorder: Recorder
    endpoints: Endpoints = field(default_factory=lambda: Endpoints({}))
    server: ModelServer | None = None
    """Serves the model over HTTP. None: `Environment.serve` is rejected."""
    index: int = 0
    """Number of the episode in its group, from 0."""
    purpose: Purpose = Purpose.TRAIN
    variant: Variant | None = None
    at: Hook = noop
    judge: Judge
    """Asks the reward service for rewards of the path to a segment."""
    announce: Announce | None = None
    """Announces a served episode to the coordinator. None: `Environment.announce` is rejected."""
    dropped: str = ""
    """Why the agent has dropped the episode."""
    prefix: int | None = None
    """Segment with the prefix of the variant."""
    private: PrivateExtras
    """The private extras of the task that the agent may read."""
    num_turns: int = 0
    num_score_calls: int = 0
    score_cut_s: float = 0.0
    """When the agent was cancelled while it awaited rewards, by the clock of the event loop. 0: never."""
    num_tokens: int = 0
    """Sampled tokens so far."""
    limit: str = ""
    """The limit that ended the episode."""
    failure: EpisodeFailed | None = None
    """The first infra failure."""
    marked: list[Sample] = field(default_factory=list)
    """The samples that the agent has chosen."""
    rewards: EnvironmentRewards = field(init=False)
    """The rewards that the agent has given."""
    abandoned: set[int] = field(default_factory=set)
    """Segments of turns that no client got. They do not become samples by default."""
    stage_s: dict[str, float] = field(default_factory=dict)
    meter: EndpointMeter = field(init=False)
    """What the agent asked of endpoints."""
    scorer_uses: list[EndpointUse] = field(default_factory=list)
    """What the scorers asked of endpoints."""
    chains: ClientChains | None = None
    """The conversations of clients to which the model was served; None if it was not."""

    def __post_init__(self) -> None:
        self.meter = EndpointMeter(self.key.episode, caller="agent")
        self.rewards = EnvironmentRewards(self.recorder)

    @property
    def format(self) -> ChatFormat:
        return self.tokenizer.format

    def check(self) -> None:
        """Raise the failure or the limit that has ended the episode."""
        if self.failure is not None:
            raise self.failure
        if self.limit:
            raise LimitReached(self.limit)

    def end_at(self, limit: str) -> LimitReached:
        self.limit = self.limit or limit
        return LimitReached(self.limit)


class _Crossing:
    """A call into the mesh. It adds the time to `stage`, attributes a failure to `boundary`, stores the first failure,
    and has a span."""

    __slots__ = ("_boundary", "_span", "_stage", "_start_s", "_state")

    def __init__(self, state: EnvironmentState, stage: str, boundary: str, span: str) -> None:
        self._state, self._stage, self._boundary = state, stage, boundary
        self._span = tracing.span(span, SERVICE)

    def __enter__(self) -> Span | None:
        self._start_s = self._state.clock.monotonic_s()
        return self._span.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        state, stage = self._state, self._stage
        self._span.__exit__(kind, err, trace)
        state.stage_s[stage] = state.stage_s.get(stage, 0.0) + state.clock.monotonic_s() - self._start_s
        if not isinstance(err, Exception):
            return
        failed = err if isinstance(err, EpisodeFailed) else EpisodeFailed(self._boundary, err)
        state.failure = state.failure or failed
        if failed is not err:
            raise failed from err


class Environment:
    """One branch of an episode's conversation."""

    def __init__(self, state: EnvironmentState, tools: ToolBox | None = None) -> None:
        self._state = state
        self._tools = tools or state.tools
        self._head = ROOT
        self._tokens: list[IntArray] = []
        self._num_tokens = 0

    # Acting -----------------------------------------------------------------------------------------------------------

    async def generate(
        self,
        *,
        stop: Sequence[str] | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        train: bool = True,
        on_piece: Callable[[Segment], None] | None = None,
        begin: IntArray | None = None,
    ) -> Turn:
        """Generate from here until one of `stop` (by default the end of its turn), which is kept.

        Omitted parameters come from the config. `train=False` keeps the tokens out of the loss. `on_piece` is called
        with new tokens as they arrive; it must not raise. `begin` are tokens [n] that the turn begins with: they are
        recorded with the turn, as given tokens without loss, and are not in the returned turn. Raises `LimitReached`.
        """
        state = self._state
        state.check()
        begin = np.zeros(0, dtype=np.int32) if begin is None else begin
        params = self._params(stop, max_tokens, temperature, top_p, room=self.tokens_left - begin.size)
        with _Crossing(state, "generate", "inference", "generate") as traced:
            spans = await self._generate(params, train=train, on_piece=on_piece, begin=begin)
            if traced is not None:
                traced.set_attributes(_generation_attributes(spans, state.num_turns, self._num_tokens + begin.size))
        return self._record(spans, params, train=train, begin=begin)

    async def logprobs(
        self,
        token_ids: Sequence[int] | IntArray,
        *,
        under: Prompt | None = None,
        step: int | PolicyVersion | None = None,
        outputs: Sequence[str] = (),
    ) -> ScoredTokens:
        """Return log-probs, and arrays of `outputs`, of given tokens [n], n >= 1, after this branch or after another
        prompt.

        `under` is that prompt: messages, which the chat template encodes, or token ids. The tokens are scored under the
        plain softmax of the current weights, or of exactly a step or version; StaleWeights if no node serves it. They
        do not become part of the branch.
        """
        state = self._state
        state.check()
        prompt = self.token_ids
        if under is not None:
            prompt = prompt_ids(under, lambda messages: state.tokenizer.encode_prompt(messages, self._tools.schemas))
        row, most = sequence(prompt, token_ids), state.limits.context_tokens_max
        if row.size > most:  # the agent's mistake, and not a failure of the engine
            raise ValueError(
                f"the prompt and the tokens to score must have at most rollout.limits.context_tokens_max = {most} "
                f"tokens, got {row.size}"
            )
        target = exactly(state.target, step)
        gone: StaleWeights | None = None
        with _Crossing(state, "logprobs", "inference", "logprobs"):
            try:
                (scored,) = await state.generator.score([row], target=target, outputs=outputs)
            except StaleWeights as err:
                if step is None:
                    raise
                gone = err  # a result, not an infra failure: a retry would not find the step either
        if gone is not None:
            raise gone
        return scored.after(prompt.size)

    async def tool(self, name: str, text: str) -> ToolResult:
        """Call a tool of the task. An error inside the tool is a result with `ok` False. The call itself does not add
        an observation.

        A tool that the task does not list fails the attempt, because the agent and not the model chose it.
        """
        state = self._state
        state.check()
        boundary = "sandbox" if name in self._tools.names else "agent"
        with _Crossing(state, "tool", boundary, "tool") as traced:
            begin_s = state.clock.monotonic_s()
            result = await self._tools.call(name, text)
            result = replace(result, wall_s=state.clock.monotonic_s() - begin_s)
            if traced is not None:
                traced.set_attributes({"tool": name, "ok": result.ok})
        count(TOOL_CALLS, "ok" if result.ok else "error")
        return result

    async def ask(
        self,
        endpoint: str,
        messages: Messages,
        *,
        temperature: float | None = None,
        max_tokens: int | None = None,
        top_p: float | None = None,
        stop: Sequence[str] = (),
        json: bool = False,
        tools: Sequence[ToolSchema] = (),
        tool_choice: Literal["auto", "none"] = "auto",
    ) -> EndpointAnswer:
        """Ask a model of the table `endpoints`. The answer does not become part of the branch; `observe` appends a text
        of it.

        Omitted parameters come from the table. With `json` the answer must be a JSON value, which is
        `EndpointAnswer.value`. `tools`, in the form of the OpenAI protocol, are only for the kind `openai`. Tokens,
        price and latency are stored with the episode. A failure of the endpoint is an infra failure of the episode.
        """
        state = self._state
        state.check()
        with _Crossing(state, "ask", "ask", "ask") as traced:
            answer = await state.endpoints.ask(
                endpoint,
                messages,
                temperature=temperature,
                max_tokens=max_tokens,
                top_p=top_p,
                stop=stop,
                json=json,
                tools=tools,
                tool_choice=tool_choice,
                meter=state.meter,
            )
            if traced is not None:
                traced.set_attributes({"endpoint": endpoint, "tokens": answer.completion_tokens})
        return answer

    async def score(self, *names: str) -> dict[str, float | None]:
        """Return rewards of this branch, up to its last action, as they are now: name -> value of the whole sample, or
        None for one that is not applicable.

        `names` are those of `reward.scorers`; no names mean those that score the task. The result also has the rewards
        that their scorers read. The rewards of the episode are computed again at its end. A scorer that fails is an
        infra failure of the episode. Raises `LimitReached` after `limits.score_calls_max` calls, and ValueError for a
        branch without an action.
        """
        state = self._state
        state.check()
        leaf = state.recorder.last_action(self._head)
        if leaf is None:
            raise ValueError("score() requires a generation on this branch; call generate() first")
        if state.num_score_calls >= state.limits.score_calls_max:
            raise state.end_at("score_calls")
        state.num_score_calls += 1
        with _Crossing(state, "score", "scorer", "ask_scorers"):
            try:
                rewards = await state.judge(leaf, names)
            except asyncio.CancelledError:
                state.score_cut_s = asyncio.get_running_loop().time()
                raise
        count(SCORE_CALLS)
        return {
            reward.name: reward.value if reward.outcome is Outcome.OK else None
            for reward in rewards
            if reward.segment == WHOLE_SAMPLE
        }

    def observe(self, result: str | ToolResult, *, source: Source = Source.TOOL) -> None:
        """Append a text in the format's observation frame, up to the start of the model's next turn. With a
        `ToolResult` it is recorded how the call ended, for scorers."""
        state = self._state
        tool = result.outcome if isinstance(result, ToolResult) else None
        if tool is not None:
            check_tool(tool, "ToolResult")
        text = self.shortened(result.text if isinstance(result, ToolResult) else result)
        message = Message(role=state.format.tool_role, content=text)
        self._give(Role.OBSERVATION, source, self.observation(text), [message], tool=tool)

    def observation(self, text: str) -> IntArray:
        """Return the tokens of a text in the format's observation frame, [n] int32, without appending them."""
        before, after = self._state.format.frame
        encoder = self._state.tokenizer
        return np.concatenate([encoder.encode_markup(before), encoder.encode_text(text), encoder.encode_markup(after)])

    def shortened(self, text: str) -> str:
        """Return a text as `observe` shows it, in at most `limits.observation_chars_max` characters."""
        return shorten(text, self._state.limits.observation_chars_max)

    def context(self, messages: Sequence[Message], *, source: Source = Source.PROMPT) -> None:
        """Start a new context with other messages. The previous context remains a separate sample."""
        self.begin(self._state.tokenizer.encode_prompt(messages, self._tools.schemas), messages, source=source)

    def begin(self, token_ids: IntArray, messages: Sequence[Message], *, source: Source = Source.PROMPT) -> None:
        """Start a new context with given tokens [n]. `messages` are their text view."""
        self._head, self._tokens, self._num_tokens = ROOT, [], 0
        self._give(Role.CONTEXT, source, token_ids, messages)

    def append(
        self,
        token_ids: IntArray,
        *,
        role: Role = Role.CONTEXT,
        source: Source = Source.HINT,
        messages: Sequence[Message] | None = None,
        train: bool = False,
    ) -> None:
        """Append tokens [n] unchanged: a hint, or with `Role.ACTION` the beginning of an answer, which scorers read as
        part of it.

        The tokens were not sampled, so they do not count as tokens of the policy, and `source` is not POLICY or PEER.
        With `train`, loss terms that do not read behavior log-probs train on them, such as on a solution from a data
        set. An action whose last token ends the turn is a finished turn. `messages` are the text view of the tokens, by
        default one message with their text.
        """
        state = self._state
        if source in SAMPLED_SOURCES:
            raise ValueError(
                f"`source` must be one of tokens that were not sampled, such as DATASET, got {source.name}"
            )
        given = np.asarray(token_ids, dtype=np.int32)
        speaker = {Role.ACTION: state.format.assistant_role, Role.OBSERVATION: state.format.tool_role}.get(role, "user")
        if messages is None:
            messages = [Message(role=speaker, content=state.format.without_end(state.tokenizer.decode(given)))]
        ends = [state.tokenizer.token_id(word) for word in state.format.turn_ends] if role is Role.ACTION else []
        finish = FinishReason.STOP if given.size and int(given[-1]) in ends else FinishReason.UNFINISHED
        self._give(role, source, given, messages, train=train, finish=finish)

    def give_segment(self, segment: Segment, params: SamplingParams | None = None) -> None:
        """Append a segment of a finished episode of another source unchanged, with its log-probs and its loss mask.
        `params` are those with which it was sampled. Raises ValueError for tokens of source POLICY, which only
        `generate` appends."""
        if segment.source is Source.POLICY:
            raise ValueError("`segment.source` must not be POLICY, because this run did not sample it here")
        state = self._state
        state.check()
        self._head = state.recorder.add_segment(self._head, segment, params)
        self._grow(segment.token_ids)
        self._check_segments()

    async def fork(self) -> Environment:
        """Return a second branch with the same history, including files and variables of its tools. `lost_state` lists
        lost values.

        The branch opens a fresh tool session for one whose program prevents its snapshot. Every other failure to fork
        is an infra failure.
        """
        state = self._state
        state.check()
        with _Crossing(state, "tool", "sandbox", "fork"):
            return self._branch(await self._tools.fork())

    def branch(self) -> Environment:
        """Return a second branch with the same history that shares the tool sessions with this one."""
        return self._branch(self._tools)

    def _branch(self, tools: ToolBox) -> Environment:
        twin = Environment(self._state, tools)
        twin._head, twin._tokens, twin._num_tokens = self._head, list(self._tokens), self._num_tokens
        return twin

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[ServedEpisode]:
        """Serve the model of this episode over HTTP in the OpenAI protocol, until the context ends.

            async with env.serve() as api:
                client = AsyncOpenAI(base_url=api.base_url, api_key=api.key)

        Each conversation of the clients is a branch. Raises ConfigError if the server cannot start.
        """
        state = self._state
        if state.server is None:
            raise FailedPrecondition("this worker has no server for the OpenAI protocol; run the agent in a mesh")
        async with state.server.open(self) as served:
            try:
                yield served
            finally:
                state.chains = (state.chains or ClientChains()).plus(served.client_chains)

    async def announce(
        self, api: ServedEpisode, *, idle_s_max: float, reward_s_max: float, wait_s: float
    ) -> Mapping[str, float] | None:
        """Let an application that opens this episode (RunService.OpenEpisode) get the address and the key of `api`, and
        wait for its end up to `wait_s` seconds, at most 60. Repeat it until the episode ends. The limits are those of
        OpenEpisodeResponse; the agent keeps them.

        Returns the rewards with which the application finishes the episode, by name; empty if it drops the episode;
        None if it has not finished it. Raises an infra failure if the coordinator stays unreachable.
        """
        if self._state.announce is None:
            raise FailedPrecondition("this worker cannot serve applications; run the agent in a mesh")
        served = run_pb2.OpenEpisodeResponse(
            base_url=api.base_url, api_key=api.key, model=MODEL, idle_s_max=idle_s_max, reward_s_max=reward_s_max
        )
        with boundary("coordinator"):
            return await self._state.announce(served, wait_s)

    def drop(self, reason: str) -> None:
        """End the episode without samples, when `run` returns: it counts as filtered(REASON) in the run, and is not
        repeated. For reasons that have nothing to do with what the model did, because a baseline lacks the episode.
        Raises ValueError for a reason of another form than that of finalizers."""
        if not is_word(reason):
            raise ValueError(f"the reason for which an episode is dropped must {WORD_FORM}, got {reason!r:.100}")
        self._state.dropped = reason

    def check(self) -> None:
        """Raise the infra failure or the limit that has ended the episode."""
        self._state.check()

    def fail(self, cause: Exception) -> None:
        """Make the episode an infra failure of its agent, for an agent that cannot raise, because it is cancelled."""
        self._state.failure = self._state.failure or EpisodeFailed("agent", cause)

    def sample(self, *, role: str = "", weight: float = 1.0, trainable: bool = True) -> None:
        """Make this branch, up to its last action, a sample. If no branch calls this, every branch with an action
        becomes one.

        Tokens before a fork are shared by several samples. Each sample trains them with its advantage. To count them
        once, give the samples weights that sum to 1. The baseline always counts an episode once.
        """
        state = self._state
        leaf = state.recorder.last_action(self._head)
        if leaf is None:
            raise ValueError("sample() requires a generation on this branch; call generate() first")
        policy = state.target.policy
        state.marked.append(
            Sample(sample_id="", leaf=leaf, role=role, policy=policy, weight=weight, trainable=trainable)
        )

    def reward(
        self, name: str, value: float, *, turn: int | None = None, evidence: str = "", episode: bool = False
    ) -> None:
        """Give a reward that only the environment knows, such as the score of a game. A scorer `environment` of the run
        declares its name and range.

        It belongs to this branch up to its last action, so to all samples whose path contains that action: after
        `fork` to one branch, before `fork` to both. `turn` addresses one turn of the branch as in a list: 0 is the
        first, -1 the last. `episode` addresses all samples of the episode, also those of other contexts. It works after
        a limit too, such as in `finally`. Raises ValueError for a value that is not a number in [-1e30, 1e30], a second
        value of a name, a turn that does not exist, and more than `ENVIRONMENT_REWARDS_MAX` rewards.
        """
        if episode and turn is not None:
            raise ValueError(f"`turn` of the reward {name!r} must be None with `episode`, got {turn}")
        self._state.rewards.give(name, value, head=ROOT if episode else self._head, turn=turn, evidence=evidence)

    def abandon(self, before: Environment) -> None:
        """Keep the turns between `before`, the branch that was forked, and here from becoming a sample by default."""
        self._state.abandoned.update(self._since(before))

    def abandon_cancelled(self, before: Environment) -> None:
        """Do what `abandon` does if the last turn was cancelled."""
        if (turn := self._since(before)) and self._state.recorder.segments[turn[-1]].finish is FinishReason.CANCELLED:
            self.abandon(before)

    def _since(self, before: Environment) -> list[int]:
        recorder = self._state.recorder
        return recorder.path(self._head)[len(recorder.path(before._head)) :]

    # Looking ----------------------------------------------------------------------------------------------------------

    @property
    def key(self) -> EpisodeKey:
        return self._state.key

    @property
    def task(self) -> Task:
        return self._state.task

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Names of the models that `ask` knows."""
        return self._state.endpoints.names

    @property
    def endpoint_kinds(self) -> Mapping[str, EndpointKind]:
        """Their kinds, by name."""
        return self._state.endpoints.kinds

    @property
    def tool_schemas(self) -> tuple[ToolSchema, ...]:
        """The tools of the task as described in the prompt, in the form of the OpenAI protocol."""
        return self._tools.schemas

    @property
    def index(self) -> int:
        """Number of the episode in its group, from 0. A retry has the same number. An agent may treat episode 0 in
        another way."""
        return self._state.index

    @property
    def purpose(self) -> Purpose:
        """What the episode is for. An agent that gives a solution while training must not do so in an evaluation."""
        return self._state.purpose

    @property
    def variant(self) -> Variant | None:
        """What distinguishes the episode within its group, such as its name and its options; None if the episodes of
        the group are alike. The worker has applied it already. A retry has the same one."""
        return self._state.variant

    @property
    def opening(self) -> str:
        """The text of the prefix of the variant, if the next turn continues it; else empty. It is a part of the answer,
        but not of the text of the turn."""
        state = self._state
        if self._head != state.prefix:
            return ""
        return state.tokenizer.decode(state.recorder.segments[self._head].token_ids)

    def private_extra(self, name: str) -> Any:
        """Return a private extra of the task, such as its solution: a JSON value. The agent must declare it in
        `private_extras`. What it puts into the conversation, a tool call or an exception is not private any more.

        Raises PermissionDenied for a name that it does not declare, and in an evaluation for one that is not in its
        `environment_extras`, and InvalidInput if the task does not have it.
        """
        return self._state.private.read(name)

    def private_text(self, name: str) -> str:
        """Return a private extra that is a text; empty for null. Raises as `private_extra`, and InvalidInput for
        another value."""
        return self._state.private.text(name)

    @property
    def format(self) -> ChatFormat:
        """The markers of the conversation, from the model's chat template."""
        return self._state.format

    @property
    def tags(self) -> Mapping[str, bool]:
        """The texts that markup encodes as one token; True for special tokens, such as those that open and end
        turns."""
        return self._state.tokenizer.tags

    @property
    def lost_state(self) -> tuple[str, ...]:
        """Values that the tools of this branch lost in the fork, as `profile: name`, e.g. an open file."""
        return self._tools.lost

    @property
    def messages(self) -> tuple[Message, ...]:
        """The text view of this branch."""
        return self._state.recorder.messages(self._head)

    def encode(self, text: str, *, end: bool = False, markup: bool = False) -> IntArray:
        """Return the tokens of a text, [n] int32. `end` adds the end of a turn.

        Special tokens in the text are encoded as plain text. With `markup` they are special, as in a tool call that the
        agent gives: for a text of which no part comes from a model or a tool.
        """
        tokenizer = self._state.tokenizer
        tokens = tokenizer.encode_markup(text) if markup else tokenizer.encode_text(text)
        return np.concatenate([tokens, tokenizer.encode_markup(self.format.turn_end)]) if end else tokens

    def decode(self, token_ids: IntArray) -> str:
        """Return the text of tokens [n], with special tokens as text."""
        return self._state.tokenizer.decode(token_ids)

    @property
    def token_ids(self) -> IntArray:
        """All tokens of this branch, [n] int32."""
        return np.concatenate(self._tokens) if self._tokens else np.zeros(0, dtype=np.int32)

    @property
    def turns_left(self) -> int:
        """Number of generations left in the episode."""
        return max(0, self._state.limits.turns_max - self._state.num_turns)

    @property
    def context_tokens_max(self) -> int:
        """Maximum number of tokens of a branch."""
        return self._state.limits.context_tokens_max

    @property
    def num_ids(self) -> int:
        """Token ids are in [0, num_ids)."""
        return self._state.tokenizer.num_ids

    @property
    def segments_left(self) -> int:
        """Number of segments that the episode may get before the limit of segments ends it."""
        return max(0, self._state.limits.segments_max - len(self._state.recorder.segments) - 1)

    @property
    def tokens_left(self) -> int:
        """Maximum number of tokens of the next generation."""
        limits = self._state.limits
        left = min(limits.tokens_max - self._state.num_tokens, limits.context_tokens_max - self._num_tokens)
        return max(0, left)

    # Inside -----------------------------------------------------------------------------------------------------------

    def _params(
        self,
        stop: Sequence[str] | None,
        max_tokens: int | None,
        temperature: float | None,
        top_p: float | None,
        *,
        room: int,
    ) -> SamplingParams:
        """Build the parameters and count the turn, so that of two concurrent generations only one takes the last turn.
        `room` is the number of tokens that the limits still allow."""
        state, sampling = self._state, self._state.sampling
        if not self.turns_left:
            raise state.end_at("turns")
        if room <= 0:
            raise state.end_at("tokens")
        state.num_turns += 1
        words = state.format.turn_ends if stop is None else tuple(stop)
        # Other tokens of the vocabulary are also a part of longer ones, so that their ids do not find a text.
        tags = {*state.format.turn_ends, *state.tokenizer.tags}
        ids = {word: state.tokenizer.token_id(word) if word in tags else None for word in words}
        return SamplingParams(
            temperature=sampling.temperature if temperature is None else temperature,
            top_p=sampling.top_p if top_p is None else top_p,
            top_k=sampling.top_k,
            max_tokens=min(max_tokens or sampling.max_tokens, room),
            stop=tuple(word for word, number in ids.items() if number is None),
            stop_token_ids=tuple(number for number in ids.values() if number is not None),
            seed=state.recorder.draw_key(self._head),
        )

    async def _generate(
        self, params: SamplingParams, *, train: bool, on_piece: Callable[[Segment], None] | None, begin: IntArray
    ) -> tuple[Segment, ...]:
        """Generate and record. If the episode times out during a generation, record the tokens sampled so far."""
        state = self._state
        pieces: list[Segment] = []
        session = f"{state.key.episode}.{state.key.attempt}"
        try:
            async with state.generator.open(
                np.concatenate([self.token_ids, begin]), params, target=state.target, session=session, key=state.key
            ) as generation:
                async for piece in generation:
                    pieces.append(piece)
                    if on_piece is not None:
                        on_piece(piece)
                    if len(pieces) == 1:
                        await state.at(RolloutFaultPoint.GENERATING)
        except asyncio.CancelledError:
            if pieces:
                self._record(merged(pieces, FinishReason.CANCELLED), params, train=train, begin=begin)
            raise
        if generation.finish not in _ENDED or not pieces:
            raise EngineFailed(f"the engine finished with {generation.finish.name} after {len(pieces)} pieces; retry")
        return merged(pieces, generation.finish)

    def _record(self, segments: Sequence[Segment], params: SamplingParams, *, train: bool, begin: IntArray) -> Turn:
        state = self._state
        if begin.size:
            opening = [Message(role=state.format.assistant_role, content=state.tokenizer.decode(begin))]
            self._head = state.recorder.add_given(self._head, Role.ACTION, Source.HINT, begin, opening)
            self._grow(begin)
        token_ids = np.concatenate([segment.token_ids for segment in segments])
        text = state.tokenizer.decode(token_ids)
        message = Message(role=state.format.assistant_role, content=state.format.without_end(text))
        self._head = state.recorder.add_generated(self._head, segments, params, train=train, message=message)
        self._grow(token_ids)
        state.num_tokens += token_ids.size
        self._check_segments()
        return Turn(
            text=text,
            finish=segments[-1].finish,
            token_ids=token_ids,
            logprobs=np.concatenate([s.logprobs for s in segments if s.logprobs is not None]),
            arrays={name: np.concatenate([s.arrays[name] for s in segments]) for name in segments[0].arrays},
        )

    def _give(
        self,
        role: Role,
        source: Source,
        token_ids: IntArray,
        messages: Sequence[Message],
        *,
        train: bool = False,
        finish: FinishReason = FinishReason.UNFINISHED,
        tool: ToolOutcome | None = None,
    ) -> None:
        self._state.check()
        self._head = self._state.recorder.add_given(
            self._head, role, source, token_ids, messages, train=train, finish=finish, tool=tool
        )
        self._grow(token_ids)
        self._check_segments()

    def _grow(self, token_ids: IntArray) -> None:
        self._tokens.append(token_ids)
        self._num_tokens += int(token_ids.size)

    def _check_segments(self) -> None:
        if len(self._state.recorder.segments) >= self._state.limits.segments_max:
            raise self._state.end_at("segments")


def _generation_attributes(segments: Sequence[Segment], turn: int, num_prompt_tokens: int) -> dict[str, str | int]:
    last = segments[-1]
    num_tokens = sum(int(segment.token_ids.size) for segment in segments)
    return {
        "turn": turn,
        "prompt_tokens": num_prompt_tokens,
        "tokens": num_tokens,
        "version": str(last.version),
        "finish": last.finish.name,
    }

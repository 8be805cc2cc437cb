"""Run one episode from its lease to its report: private extras, INIT, RUN, SCORE, report.

The payload is appended to the sample stream before the report names it, so every reported sample has a payload. A
payload whose report never arrives is an orphan that no trainer uses.

Only this module turns failures into records. It reports every failure in the mesh or in a user's agent as an infra
failure with its boundary. It re-raises only cancellation, which closes open sessions and requests. Limits are model
failures: the episode is scored with the tokens sampled so far.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from rollmesh.services.rollout.agent import Agent, LimitReached, agent_of, permitted_extras
from rollmesh.services.rollout.agents.given import GivenAgent
from rollmesh.services.rollout.config import RolloutConfig
from rollmesh.services.rollout.environment import Environment, EnvironmentState, ModelServer
from rollmesh.services.rollout.episode_trace import SERVICE
from rollmesh.services.rollout.failures import EpisodeFailed, boundary, retry_call, to_failure
from rollmesh.services.rollout.fault_points import RolloutFaultPoint
from rollmesh.services.rollout.lease import Lease, decode_lease
from rollmesh.services.rollout.ports import (
    ApplicationPort,
    Generator,
    PrivateData,
    SampleLog,
    SandboxPort,
    ScoringPort,
)
from rollmesh.services.rollout.private_extras import PrivateExtras
from rollmesh.services.rollout.progress import WorkerProgress
from rollmesh.services.rollout.recorder import Recorder, numbered_samples
from rollmesh.services.rollout.scoring import finish_of, score_item, scored
from rollmesh.services.rollout.stages import Stage, Stages
from rollmesh.services.rollout.tokenizer import Tokenizer
from rollmesh.services.rollout.tools import ToolBox
from rollmesh.services.rollout.variants import VariantAgents, VariantTexts, check_permission, texts_of, with_hint
from rollmesh.shared.clock import Clock, time_limit
from rollmesh.shared.codec.metadata import sample_meta
from rollmesh.shared.codec.trajectory import encode_episode, encode_key, encode_segment
from rollmesh.shared.domain.environment_reward import EnvironmentReward
from rollmesh.shared.domain.trajectory import EndpointUse, Episode, Purpose, Reward, Role, Sample, Source
from rollmesh.shared.endpoints.client import Endpoints
from rollmesh.shared.endpoints.metering import summed
from rollmesh.shared.errors import Cancelled, Code, DeadlineExceeded, EndpointFailed, InvalidInput
from rollmesh.shared.process.fault_points import Hook, noop
from rollmesh.shared.telemetry import tracing
from rollmesh.v1 import coordinator_pb2, run_pb2, types_pb2

Report = coordinator_pb2.EpisodeReport
_RESOLUTION_S = 1e-6
"""Timers may fire this much before their time."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeParts:
    """Objects that all episodes of a worker share."""

    config: RolloutConfig
    agents: Mapping[str, Agent]
    """The agents by the name that a task gives. The empty name is that of the default agent."""
    tokenizer: Tokenizer
    generator: Generator
    sandbox: SandboxPort
    scorer: ScoringPort
    data: PrivateData
    samples: SampleLog
    clock: Clock
    stages: Stages
    progress: WorkerProgress
    endpoints: Endpoints = field(default_factory=lambda: Endpoints({}))
    applications: ApplicationPort | None = None
    """For agents that serve applications."""
    server: ModelServer | None = None
    """For agents that serve the model over HTTP."""
    base_dir: str | Path | None = None
    """Folder of the configuration, for agents with the options of a variant."""
    at: Hook = noop


class EpisodeRunner:
    """Run episodes."""

    def __init__(self, parts: EpisodeParts) -> None:
        self._parts = parts
        self._variant_agents = VariantAgents(parts.config, parts.agents, parts.base_dir)

    async def run(self, message: coordinator_pb2.EpisodeLease) -> Report:
        """Run the episode and return its report. Raise only when cancelled."""
        try:
            with boundary("rollout"):
                lease = decode_lease(message)
            await self._parts.at(RolloutFaultPoint.LEASED)
            return await self._run(lease)
        except EpisodeFailed as err:
            return self._failed(message, err)
        except Exception as err:  # noqa: BLE001 - the recording point: one broken episode must not end its siblings
            return self._failed(message, EpisodeFailed("rollout", err))

    async def _run(self, lease: Lease) -> Report:
        stages, limits = self._parts.stages, self._parts.config.stages
        with boundary("task"):
            agent = self._agent(lease)
        with boundary("sandbox"):
            state = self._state(lease)
        # Before INIT: a wait for them must not hold a slot.
        state.private, texts = await self._private_extras(lease, agent)
        async with state.tools:
            async with stages.enter(Stage.INIT, state.stage_s), self._infra_limit("init", limits.init_s_max):
                env = await self._init(agent, state, texts)
            async with stages.enter(Stage.RUN, state.stage_s):
                await self._act(agent, state, env)
        if state.dropped:
            return _dropped(lease, state.dropped)
        # The sessions end before scoring, because scoring must not hold jails.
        async with stages.enter(Stage.SCORE, state.stage_s), self._infra_limit("score", limits.score_s_max):
            with boundary("rollout"):
                segments = [encode_segment(segment) for segment in state.recorder.segments]
            samples = await self._score(lease, state, segments)
        episode = _episode(lease, state, samples, summed((*state.meter.uses, *state.scorer_uses)))
        report = await self._append_payload(lease, episode, segments)
        report.num_tool_calls, report.num_tool_calls_failed = state.tools.calls.total(), state.tools.calls[False]
        return report

    # INIT -------------------------------------------------------------------------------------------------------------

    def _state(self, lease: Lease) -> EnvironmentState:
        parts, config = self._parts, self._parts.config
        sampling = config.sampling
        if lease.purpose is Purpose.EVAL and config.eval_sampling is not None:
            sampling = config.eval_sampling
        if lease.variant is not None:
            sampling = msgspec.structs.replace(sampling, **lease.variant.sampling.given())
        if self._is_baseline(lease):
            sampling = msgspec.structs.replace(sampling, temperature=0.0)
        state = EnvironmentState(
            key=lease.key,
            task=lease.task,
            target=replace(lease.target, pinned=config.pin == "response" and not lease.target.exact),
            generator=parts.generator,
            tokenizer=parts.tokenizer,
            tools=ToolBox(parts.sandbox, config.tools, lease.task.tools, lease.key, config.session_ttl_s),
            clock=parts.clock,
            sampling=sampling,
            limits=config.limits,
            recorder=Recorder(lease.seed),
            endpoints=parts.endpoints,
            server=parts.server,
            index=lease.index,
            purpose=lease.purpose,
            variant=lease.variant,
            at=parts.at,
            private=PrivateExtras(lease.task, (), {}),
            announce=partial(self._announce, lease) if parts.applications is not None else None,
            judge=lambda leaf, names: self._judge(lease, state, leaf, names),
        )
        return state

    def _agent(self, lease: Lease) -> Agent:
        if lease.given is not None and lease.given_source is not None:
            return GivenAgent(lease.given, lease.given_source)
        if lease.variant is not None:
            return self._variant_agents.of(lease.task.agent, lease.variant)
        return agent_of(lease.task, self._parts.agents)

    def _is_baseline(self, lease: Lease) -> bool:
        return (
            lease.given is None
            and self._parts.config.greedy_first
            and lease.purpose is Purpose.TRAIN
            and lease.index == 0
        )

    async def _init(self, agent: Agent, state: EnvironmentState, texts: VariantTexts) -> Environment:
        env = Environment(state)
        if isinstance(agent, GivenAgent):  # the calls of its tools are over
            with boundary("task"):
                agent.begin(state.task, env)
            return env
        with boundary("task"):
            state.task = with_hint(state.task, texts.hint)
            env.context(state.task.messages)
            if texts.prefix:
                env.append(env.encode(texts.prefix), role=Role.ACTION, source=Source.HINT)
                state.prefix = len(state.recorder.segments) - 1
                state.recorder.keep_draws(state.prefix)
            if not env.tokens_left:
                raise InvalidInput(
                    f"the prompt has {env.token_ids.size} tokens, the context {state.limits.context_tokens_max}; "
                    "raise rollout.limits.context_tokens_max or drop the task"
                )
        with boundary("sandbox"):
            await state.tools.open()
        return env

    async def _private_extras(self, lease: Lease, agent: Agent) -> tuple[PrivateExtras, VariantTexts]:
        """Request what the agent declares, and what the variant names. The data link limits its retries, so that its
        error names the cause."""
        config, task, variant = self._parts.config, lease.task_message, lease.variant
        with boundary("agent"):
            names = permitted_extras(lease.task.agent or config.agent.name, agent, config)
            if variant is not None:
                check_permission(config, lease.task.agent, variant)
        withheld: tuple[str, ...] = ()
        if lease.purpose is Purpose.EVAL:
            withheld = tuple(name for name in names if name not in agent.environment_extras)
        own = tuple(name for name in names if name not in withheld)
        of_variant = variant.extras if variant is not None else ()
        wanted, values = tuple(dict.fromkeys((*own, *of_variant))), dict[str, object]()
        if wanted and not lease.submitted:  # another task of the data service may have the id of a submitted one
            with boundary("data"):
                values |= await self._parts.data.private_extras(
                    run=lease.key.run, split=task.split, task_id=task.task_id, names=wanted
                )
        with boundary("agent"):
            texts = texts_of(variant, PrivateExtras(lease.task, of_variant, values)) if variant else VariantTexts()
        return PrivateExtras(lease.task, names, values, withheld), texts

    @asynccontextmanager
    async def _infra_limit(self, stage: str, limit_s: float) -> AsyncIterator[None]:
        try:
            async with time_limit(self._parts.clock, limit_s) as limit:
                yield
        except TimeoutError as err:
            if not limit.expired():
                raise
            cause = DeadlineExceeded(f"stage exceeded {limit_s} s; retry, or raise rollout.stages.{stage}_s_max")
            raise EpisodeFailed(stage, cause) from err

    # RUN --------------------------------------------------------------------------------------------------------------

    async def _act(self, agent: Agent, state: EnvironmentState, env: Environment) -> None:
        limit_s = state.limits.run_s_max
        try:
            async with time_limit(self._parts.clock, limit_s) as limit:
                await self._run_agent(agent, state, env)
        except TimeoutError as err:
            if not limit.expired():
                raise EpisodeFailed("agent", err) from err
            late_s = (limit.when() or 0.0) - _RESOLUTION_S
            if (endpoint := state.meter.cut) and state.meter.cut_s >= late_s:  # the model did not cause it
                late = EndpointFailed(
                    f"endpoint `{endpoint}`: no answer before the end of rollout.limits.run_s_max = {limit_s:g} s; "
                    "lower its timeout_s and retry_s, or raise the limit",
                    endpoint=endpoint,
                )
                raise EpisodeFailed("ask", late) from err
            if state.score_cut_s >= late_s:
                unscored = DeadlineExceeded(
                    f"env.score had no reward before the end of rollout.limits.run_s_max = {limit_s:g} s; lower "
                    "timeout_s of the scorers, add reward nodes, or raise the limit"
                )
                raise EpisodeFailed("scorer", unscored) from err
            state.end_at("seconds")
        if state.failure is not None:
            raise state.failure
        if state.limit and not state.dropped and not _leaves(state):
            # A limit without a sampled token is not a model failure.
            cause = DeadlineExceeded(
                f"no token was sampled before the limit `{state.limit}` ({limit_s:g} s); check that engines are ready, "
                "and that the agent calls the model"
            )
            raise EpisodeFailed("inference", cause)

    async def _run_agent(self, agent: Agent, state: EnvironmentState, env: Environment) -> None:
        try:
            await agent.run(state.task, env)
        except LimitReached as err:
            state.end_at(err.limit)
        except (EpisodeFailed, TimeoutError):
            raise
        except Exception as err:  # user code may raise any exception; run() records it
            raise state.failure or EpisodeFailed("agent", err) from err

    async def _announce(
        self, lease: Lease, served: run_pb2.OpenEpisodeResponse, wait_s: float
    ) -> Mapping[str, float] | None:
        """Announce a served episode, see `Environment.announce`."""
        parts = self._parts
        assert parts.applications is not None, "the environment checks it"
        applications = parts.applications

        async def serve() -> coordinator_pb2.ServeEpisodeResponse:
            return await applications.serve(lease.lease_id, served, wait_s)

        said = await retry_call(serve, parts.config.worker, parts.clock)
        return dict(said.rewards) if said.finished else None

    # SCORE ------------------------------------------------------------------------------------------------------------

    async def _judge(
        self, lease: Lease, state: EnvironmentState, leaf: int, names: Sequence[str]
    ) -> tuple[Reward, ...]:
        """Return the rewards `names` of the path to the segment `leaf`, while the episode runs."""
        asked = Sample(
            sample_id=f"{lease.key.episode}-score{state.num_score_calls}",
            leaf=leaf,
            policy=lease.target.policy,
            finish=state.recorder.segments[leaf].finish,
        )
        segments = [encode_segment(segment) for segment in state.recorder.segments[: leaf + 1]]
        path = set(state.recorder.path(leaf))
        rewards = [reward for reward in state.rewards if reward.of(path)]  # others may rate segments that are not sent
        (sample,) = await self._scored(lease, state, [asked], segments, rewards, names)
        return sample.rewards

    async def _score(
        self, lease: Lease, state: EnvironmentState, segments: Sequence[types_pb2.Segment]
    ) -> tuple[Sample, ...]:
        recorder = state.recorder
        leaves = _leaves(state, state.abandoned)
        if state.limit and not leaves:  # such as a program that was ended in its first turn, at the time limit
            leaves = _leaves(state)
        if leaves and state.prefix is not None and state.prefix not in {one.parent for one in recorder.segments}:
            raise EpisodeFailed("agent", _prefix_not_used(lease))
        marked = state.marked or [Sample(sample_id="", leaf=leaf, policy=lease.target.policy) for leaf in leaves]
        samples = [
            replace(
                sample,
                finish=finish_of(recorder.segments[sample.leaf], cut=bool(state.limit)),
                trainable=sample.trainable and not self._is_baseline(lease),
                role=sample.role or (lease.variant.role if lease.variant is not None else ""),
            )
            for sample in numbered_samples(lease.key.episode, marked)
        ]
        return await self._scored(lease, state, samples, segments, list(state.rewards)) if samples else ()

    async def _scored(
        self,
        lease: Lease,
        state: EnvironmentState,
        samples: Sequence[Sample],
        segments: Sequence[types_pb2.Segment],
        rewards: Sequence[EnvironmentReward],
        names: Sequence[str] = (),
    ) -> tuple[Sample, ...]:
        with boundary("scorer"):
            columns = await self._parts.scorer.columns()
            item = score_item(lease, samples, segments, columns, rewards=rewards, uses=state.meter.uses, scorers=names)
            given = await self._parts.scorer.score(lease.key.run, item, state.scorer_uses)
        return scored(samples, given)

    # Append -----------------------------------------------------------------------------------------------------------

    async def _append_payload(self, lease: Lease, episode: Episode, segments: Sequence[types_pb2.Segment]) -> Report:
        with boundary("rollout"):
            message = encode_episode(episode, segments)
            payload = message.SerializeToString(deterministic=True)
        with boundary("bus"), tracing.span("store", SERVICE):
            message_id = f"{lease.key.episode}.{lease.key.attempt}"
            sequence = await self._parts.samples.append(lease.key.run, payload, message_id=message_id)
        await self._parts.at(RolloutFaultPoint.STORED)
        self._parts.progress.add_tokens(episode)
        return Report(
            lease_id=lease.lease_id,
            key=encode_key(lease.key),
            outcome=coordinator_pb2.EPISODE_OUTCOME_COMPLETED,
            payload=types_pb2.PayloadRef(sequence=sequence, size_bytes=len(payload)),
            samples=[
                sample_meta(message, sample, text_chars=self._parts.config.summary_text_chars)
                for sample in message.samples
            ],
        )

    def _failed(self, lease: coordinator_pb2.EpisodeLease, err: EpisodeFailed) -> Report:
        self._parts.progress.record_failure(err)
        _log.info("infra failure: %s", err)
        return _unfinished(lease, coordinator_pb2.EPISODE_OUTCOME_INFRA_FAILURE, to_failure(err))


def cancelled_report(lease: coordinator_pb2.EpisodeLease, reason: str) -> Report:
    """Return a report that releases an unfinished episode."""
    failure = types_pb2.Failure(code=Code.CANCELLED.value, reason=Cancelled.reason, message=reason)
    return _unfinished(lease, coordinator_pb2.EPISODE_OUTCOME_CANCELLED, failure)


def _leaves(state: EnvironmentState, without: Collection[int] = ()) -> list[int]:
    """Return `Recorder.leaves`. A prefix that no turn continues is not an answer."""
    return [leaf for leaf in state.recorder.leaves(without) if leaf != state.prefix]


def _prefix_not_used(lease: Lease) -> InvalidInput:
    assert lease.variant is not None
    return InvalidInput(
        f"the agent has not continued the prefix of the variant `{lease.variant.name}`, because it begins another "
        "context; use a hint, or another agent"
    )


def _dropped(lease: Lease, reason: str) -> Report:
    """Return the report of an episode that its agent has dropped."""
    return Report(
        lease_id=lease.lease_id,
        key=encode_key(lease.key),
        outcome=coordinator_pb2.EPISODE_OUTCOME_COMPLETED,
        failure=types_pb2.Failure(reason=reason),
    )


def _unfinished(
    lease: coordinator_pb2.EpisodeLease, outcome: coordinator_pb2.EpisodeOutcome.ValueType, failure: types_pb2.Failure
) -> Report:
    return Report(lease_id=lease.lease_id, key=lease.key, outcome=outcome, failure=failure)


def _episode(
    lease: Lease, state: EnvironmentState, samples: tuple[Sample, ...], endpoints: tuple[EndpointUse, ...]
) -> Episode:
    return Episode(
        key=lease.key,
        purpose=lease.purpose,
        segments=tuple(state.recorder.segments),
        sampling_params=tuple(state.recorder.sampling_params),
        samples=samples,
        stage_s=dict(state.stage_s),
        traceparent=tracing.traceparent(),
        endpoints=endpoints,
        chains=state.chains,
        variant=lease.variant.name if lease.variant is not None else "",
    )

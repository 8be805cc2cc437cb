"""The player as a rollout worker: episodes with payloads, and reports that are true, late, repeated, contradictory or
malformed."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rollmesh.v1 import coordinator_pb2 as pb
from rollmesh.v1 import types_pb2

from .calls import Answer, Calls
from .dropping import MALFORMED, REASONS
from .ends import Ends
from .lies import EXTERNAL, LIES, other_key
from .model import MadeSample, RunModel, Stamp, require

OK = types_pb2.REWARD_OUTCOME_OK
COMPLETED = pb.EPISODE_OUTCOME_COMPLETED
DROP_WEIGHTS = (0.86, 0.06, 0.04, 0.03, 0.01)
"""Shares of samples that are kept, dropped for each reason, and dropped with a malformed one."""
REJOINING = ("UNKNOWN_NODE",)
"""Longest time until the worker has joined again after a restart of the coordinator, in seconds."""


@dataclass(slots=True)
class Worker:
    """Leases and reports episodes of one run."""

    ends: Ends
    calls: Calls
    model: RunModel
    rng: random.Random
    run: str
    node_id: str
    lenient: bool
    """Whether episode leases may be lost: services are killed, or terms are short."""
    leases: list[pb.EpisodeLease] = field(default_factory=list)
    last: pb.EpisodeReport | None = None
    """The last report that was recorded."""
    seen: set[str] = field(default_factory=set)

    async def acquire(self, num_max: int, wait_s: float = 0.2) -> int:
        """Lease episodes. Return their number."""
        request = pb.AcquireRolloutsRequest(node_id=self.node_id, num_max=num_max, wait_s=wait_s)
        answer = await self.calls.call(self.ends.coordinator.AcquireRollouts, request, also_lost=REJOINING)
        require(answer.ok, f"AcquireRollouts was answered {answer}")
        require(len(answer.response.leases) <= num_max, "more leases than were asked for")
        for lease in answer.response.leases:
            require(lease.key.run == self.run, f"{lease.lease_id} is of another run")
            require(lease.lease_id not in self.seen, f"episode lease {lease.lease_id} was granted twice")
            require(
                (lease.step_min, self.model.incarnation) >= (0, lease.incarnation_min), f"{lease.lease_id}: {lease}"
            )
            self.seen.add(lease.lease_id)
            if lease.HasField("given"):
                self._take_given(lease)
        self.leases.extend(answer.response.leases)
        return len(answer.response.leases)

    def _take_given(self, lease: pb.EpisodeLease) -> None:
        """Check that a given episode is one of a submitted group, which is one group of the run."""
        key = lease.task.task_id
        require(key in self.model.submitted, f"{lease.lease_id} gives an episode of {key}, which was never submitted")
        require(self.model.given.setdefault(lease.key.group, key) == key, f"{lease.key.group} is of two submissions")
        groups = [group for group, of in self.model.given.items() if of == key]
        require(groups == [lease.key.group], f"submitted group {key} became {groups}")
        require(lease.given_source == types_pb2.SEGMENT_SOURCE_PEER, f"source {lease.given_source} of {key}")
        text, num = lease.given.segments[0].messages[0].content, self.model.submitted[key].num_episodes
        require(text in [f"said {number}" for number in range(num)], f"{key} gives {text!r}")

    async def renew(self) -> None:
        """Renew the held leases. Drop those that have ended."""
        request = pb.RenewLeasesRequest(node_id=self.node_id, lease_ids=[lease.lease_id for lease in self.leases])
        answer = await self.calls.call(self.ends.coordinator.RenewLeases, request, also_lost=REJOINING)
        require(answer.ok, f"RenewLeases was answered {answer}")
        gone = set(answer.response.gone)
        require(gone <= set(request.lease_ids), "a lease is gone that was not held")
        self.leases = [lease for lease in self.leases if lease.lease_id not in gone]

    async def report_all(self) -> None:
        """Report every held episode, each in a random way. Keep some for later."""
        kept = [lease for lease in self.leases if self.rng.random() < 0.04]
        done = [lease for lease in self.leases if lease not in kept]
        self.leases = kept
        if done:
            await self.report([await self.finished(lease) for lease in done])

    async def report(self, reports: list[tuple[pb.EpisodeReport, list[MadeSample]]]) -> None:
        request = pb.ReportEpisodesRequest(node_id=self.node_id, reports=[report for report, _ in reports])
        answer = await self.calls.call(self.ends.coordinator.ReportEpisodes, request, also_lost=REJOINING)
        require(answer.ok, f"a valid report was answered {answer}")
        require(len(answer.response.results) == len(reports), "not one result per report")
        for (report, samples), result in zip(reports, answer.response.results, strict=True):
            if result and not self.model.admits(samples):
                require(result.startswith(("INVALID_REPORT", "UNKNOWN_LEASE")), f"a source was answered {result!r}")
                continue
            require(self.model.admits(samples), f"a source that the run does not admit was recorded: {report}")
            if result:
                lost = self.lenient or bool(self.model.rollbacks) or self.model.stopped
                require(result == "UNKNOWN_LEASE" and lost, f"report of {report.lease_id} was answered {result!r}")
                continue
            self.last = report
            if report.outcome == COMPLETED:
                self.model.samples.update((sample.sample_id, sample) for sample in samples)

    async def repeat(self) -> None:
        """Send the last report again: it was recorded before, or its group has ended."""
        if self.last is not None:
            request = pb.ReportEpisodesRequest(node_id=self.node_id, reports=[self.last])
            answer = await self.calls.call(self.ends.coordinator.ReportEpisodes, request, also_lost=REJOINING)
            require(answer.ok and answer.response.results[0] in ("", "UNKNOWN_LEASE"), f"repeated: {answer}")

    async def finished(self, lease: pb.EpisodeLease) -> tuple[pb.EpisodeReport, list[MadeSample]]:
        """Return a finished episode. Its payload is stored."""
        report = pb.EpisodeReport(lease_id=lease.lease_id, key=lease.key, outcome=COMPLETED)
        luck = self.rng.random()
        if luck < 0.06:
            report.outcome = pb.EPISODE_OUTCOME_CANCELLED if luck < 0.02 else pb.EPISODE_OUTCOME_INFRA_FAILURE
            report.failure.message = "agent: the player chose to fail"
            return report, []
        return report, await self._complete(lease, report)

    async def _complete(self, lease: pb.EpisodeLease, report: pb.EpisodeReport) -> list[MadeSample]:
        given = lease.HasField("given")
        num = self.rng.choices((0, 1, 2), (2, 80, 18))[0]
        episode = types_pb2.Episode(key=lease.key, purpose=lease.purpose, sampling_params=[PARAMS])
        made: list[MadeSample] = []
        for number in range(num):
            sample_id = f"{lease.key.episode}-{number}"
            stamps = () if given else self._stamps()
            external = self.rng.choice(EXTERNAL) if self.rng.random() < 0.06 else None
            external = types_pb2.SEGMENT_SOURCE_PEER if given else external
            leaf = _add_path(episode, stamps, external)
            reward = float(self.rng.random() < 0.5)
            trainable = self.rng.random() < 0.96
            drop = self.rng.choices(("", *REASONS, MALFORMED), DROP_WEIGHTS)[0] if not given else ""
            value = types_pb2.Reward(
                name="correct",
                value=reward,
                segment=-1,
                scorer="player@1",
                outcome=OK,
                evidence="why " * 1000,
                answer=drop,
            )
            episode.samples.add(
                sample_id=sample_id, leaf=leaf, policy="main", rewards=[value], weight=1.0, trainable=trainable
            )
            meta = _meta(sample_id, leaf, value, stamps, external, trainable=trainable)
            lies = self.rng.random() < 0.08 and not given
            contradicted = lies and self.rng.choice(LIES)(self.rng, self.model.versions, episode, meta)
            reported = tuple(Stamp(span.step, span.incarnation, span.num_tokens) for span in meta.steps)
            report.samples.append(meta)
            source = types_pb2.SegmentSource.Name(external).removeprefix("SEGMENT_SOURCE_").lower() if external else ""
            key = lease.key
            made.append(
                MadeSample(
                    sample_id, key.group, key.episode, reward, trainable, stamps, reported, contradicted, source, drop
                )
            )
        if self.rng.random() < 0.01:
            other_key(self.rng, episode.key)
            made = [replace(sample, contradicted=True) for sample in made]
        report.payload.CopyFrom(await self.calls.persist(lambda: self.ends.store(episode, lease.key)))
        return made

    def _stamps(self) -> tuple[Stamp, ...]:
        """Return stamps: mostly of the newest weights; sometimes of two versions, of old or undone ones, or none at
        all."""
        versions = self.model.versions
        luck = self.rng.random()
        if luck < 0.02:
            return ()
        chosen = [versions[-1]]
        if luck < 0.2:
            chosen = sorted({self.rng.choice(versions[-3:]), versions[-1]})
        elif luck < 0.26:
            chosen = [self.rng.choice(versions)]
        return tuple(Stamp(step, incarnation, self.rng.randint(1, 4)) for step, incarnation in chosen)

    async def foreign(self) -> None:
        """Report under another node, which must change nothing, and then correctly."""
        if not self.leases:
            return
        report, samples = await self.finished(self.leases.pop())
        for node_id, expected in (("stranger", ""), ("", "INVALID_ARGUMENT")):
            request = pb.ReportEpisodesRequest(node_id=node_id, reports=[report])
            answer = await self.calls.call(self.ends.coordinator.ReportEpisodes, request)
            refused = answer.code == expected or _results(answer) == ["UNKNOWN_LEASE"]
            require(refused, f"a report of node {node_id!r} was answered {answer} {_results(answer)}")
        await self.report([(report, samples)])

    # Malformed --------------------------------------------------------------------------------------------------------

    async def malformed(self) -> None:
        """Send a report that must not be recorded, and then the correct one, which must be."""
        if not self.leases:
            return
        lease = self.leases.pop()
        report, samples = await self.finished(lease)
        broken = pb.EpisodeReport()
        broken.CopyFrom(report)
        spoil = self.rng.choice(SPOILS if samples and self.model.admits(samples) else SPOILS_WITHOUT_SAMPLES)
        spoil(broken)
        request = pb.ReportEpisodesRequest(node_id=self.node_id, reports=[broken])
        answer = await self.calls.call(self.ends.coordinator.ReportEpisodes, request, also_lost=REJOINING)
        rejected = answer.code == "INVALID_ARGUMENT" or (answer.ok and answer.response.results[0] != "")
        if answer.ok and not rejected and spoil in INFRA_FAILURES:
            return  # recorded as an infra failure of this attempt, so no sample of it may show up
        require(rejected, f"a report spoiled by {spoil.__name__} was answered {answer} {_results(answer)}")
        await self.report([(report, samples)])


def _results(answer: Answer) -> list[str]:
    return list(answer.response.results) if answer.ok else []


PARAMS = types_pb2.SamplingParams(temperature=1.0, top_p=1.0, max_tokens=8, seed=1)


def _add_path(
    episode: types_pb2.Episode, stamps: tuple[Stamp, ...], external: types_pb2.SegmentSource.ValueType | None
) -> int:
    """Append a root, one action per stamp, and a given action of the source `external`. Return the index of the
    leaf."""
    episode.segments.add(
        parent=-1,
        role=types_pb2.SEGMENT_ROLE_CONTEXT,
        source=types_pb2.SEGMENT_SOURCE_PROMPT,
        token_ids=struct.pack("<3i", 1, 2, 3),
        sampling=-1,
    )
    for stamp in stamps:
        num = stamp.num_tokens
        version = types_pb2.PolicyVersion(policy="main", step=stamp.step, incarnation=stamp.incarnation)
        episode.segments.add(
            parent=len(episode.segments) - 1,
            role=types_pb2.SEGMENT_ROLE_ACTION,
            source=types_pb2.SEGMENT_SOURCE_POLICY,
            token_ids=struct.pack(f"<{num}i", *range(num)),
            logprobs=struct.pack(f"<{num}f", *[-0.5] * num),
            loss_mask=bytes([1] * num),
            version=version,
            kv_step_oldest=stamp.step,
            sampling=0,
        )
    if external is not None:
        episode.segments.add(
            parent=len(episode.segments) - 1,
            role=types_pb2.SEGMENT_ROLE_ACTION,
            source=external,
            token_ids=struct.pack("<2i", 1, 2),
            loss_mask=bytes([0, 1]),
            sampling=-1,
        )
    return len(episode.segments) - 1


def _meta(
    sample_id: str,
    leaf: int,
    reward: types_pb2.Reward,
    stamps: tuple[Stamp, ...],
    external: types_pb2.SegmentSource.ValueType | None,
    *,
    trainable: bool,
) -> types_pb2.SampleMeta:
    num_sampled = sum(stamp.num_tokens for stamp in stamps)
    return types_pb2.SampleMeta(
        sample_id=sample_id,
        policy="main",
        leaf=leaf,
        steps=[types_pb2.StepSpan(step=s.step, incarnation=s.incarnation, num_tokens=s.num_tokens) for s in stamps],
        num_tokens=3 + num_sampled + (2 if external else 0),
        num_sampled_tokens=num_sampled,
        rewards=[reward],
        trainable=trainable,
        external=[types_pb2.ExternalSpan(source=external, num_tokens=1)] if external else [],
    )


# Ways to spoil a report -----------------------------------------------------------------------------------------------


def _no_lease(report: pb.EpisodeReport) -> None:
    report.key.episode = "g999.9"


def _attempt(report: pb.EpisodeReport) -> None:
    report.key.attempt += 1


def _outcome(report: pb.EpisodeReport) -> None:
    report.outcome = 77  # type: ignore[assignment]


def _lease_of_another(report: pb.EpisodeReport) -> None:
    report.lease_id = "g999.9#1"


def _nan(report: pb.EpisodeReport) -> None:
    report.samples[0].rewards[0].value = math.nan


def _infinity(report: pb.EpisodeReport) -> None:
    report.samples[0].rewards[0].value = math.inf


def _large(report: pb.EpisodeReport) -> None:
    report.samples[0].rewards[0].value = -1e31


def _given_by_none(report: pb.EpisodeReport) -> None:
    report.samples[0].external.add(source=types_pb2.SEGMENT_SOURCE_UNSPECIFIED, num_tokens=1)


def _given_by_policy(report: pb.EpisodeReport) -> None:
    report.samples[0].external.add(source=types_pb2.SEGMENT_SOURCE_POLICY, num_tokens=1)


def _given_no_tokens(report: pb.EpisodeReport) -> None:
    report.samples[0].external.add(source=types_pb2.SEGMENT_SOURCE_HINT, num_tokens=0)


def _given_many_tokens(report: pb.EpisodeReport) -> None:
    report.samples[0].external.add(source=types_pb2.SEGMENT_SOURCE_HINT, num_tokens=2**40)


def _same_id(report: pb.EpisodeReport) -> None:
    report.samples.append(report.samples[0])


def _empty_id(report: pb.EpisodeReport) -> None:
    report.samples[0].sample_id = ""


def _long_id(report: pb.EpisodeReport) -> None:
    report.samples[0].sample_id = "x" * 1_000_000


def _other_policy(report: pb.EpisodeReport) -> None:
    report.samples[0].policy = "other"


def _many_tokens(report: pb.EpisodeReport) -> None:
    report.samples[0].num_tokens = 2**63 - 1


def _negative_tokens(report: pb.EpisodeReport) -> None:
    report.samples[0].num_tokens = -1


def _negative_step(report: pb.EpisodeReport) -> None:
    del report.samples[0].steps[:]
    report.samples[0].steps.add(step=-3, incarnation=0, num_tokens=1)


def _strange_incarnation(report: pb.EpisodeReport) -> None:
    del report.samples[0].steps[:]
    report.samples[0].steps.add(step=0, incarnation=1_000, num_tokens=1)


def _negative_incarnation(report: pb.EpisodeReport) -> None:
    del report.samples[0].steps[:]
    report.samples[0].steps.add(step=0, incarnation=-1, num_tokens=1)


def _many_span_tokens(report: pb.EpisodeReport) -> None:
    del report.samples[0].steps[:]
    report.samples[0].steps.add(step=0, incarnation=0, num_tokens=2**63 - 1)


def _no_payload(report: pb.EpisodeReport) -> None:
    report.payload.sequence = 0


def _negative_leaf(report: pb.EpisodeReport) -> None:
    report.samples[0].leaf = -7


INFRA_FAILURES = (_nan, _infinity, _large)
"""A scorer without a finite number has failed. This is not a result of the model."""
SPOILS_WITHOUT_SAMPLES: list[Callable[[pb.EpisodeReport], None]] = [_no_lease, _attempt, _outcome, _lease_of_another]
SPOILS: list[Callable[[pb.EpisodeReport], None]] = [
    *SPOILS_WITHOUT_SAMPLES,
    _nan,
    _infinity,
    _large,
    _given_by_none,
    _given_by_policy,
    _given_no_tokens,
    _given_many_tokens,
    _same_id,
    _empty_id,
    _long_id,
    _other_policy,
    _many_tokens,
    _negative_tokens,
    _negative_step,
    _strange_incarnation,
    _negative_incarnation,
    _many_span_tokens,
    _no_payload,
    _negative_leaf,
]

"""The durable state of a run: groups with their episodes and samples, the policy's clocks, batches, counters.

Only `apply.py` writes it, with `group_changes.py`. Ended samples leave memory and remain in the counters. A group
leaves when its last sample has ended. Samples follow the phase of their group unless they have ended before:

    OPEN --all episodes ended or scored--> FINALIZING --keep--> READY --lease--> LEASED --commit--> APPLIED
    --checkpoint--> gone
      ^                                       |                  ^                |   ^                 |
      +---------------- extend ---------------+                  +---- returned --+   +-- IN_DOUBT --+  |
                                                                 +----------------- rolled back --------+

In an export no sample leaves OPEN: it ends as EXPORTED with the fact that scores it. A group of the replay log begins
READY, and a replayed sample that joins a training group follows it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from enum import IntEnum

import msgspec

from rollmesh.services.coordinator.core.facts import (
    AnswerKey,
    PayloadRef,
    Purpose,
    SampleEnd,
    SampleMeta,
    SubmittedGroup,
    Task,
)
from rollmesh.services.coordinator.core.records import Bound, ForeignSource, RunSpec
from rollmesh.shared.domain.plans import Variant
from rollmesh.shared.domain.versions import PolicyVersion

VERSIONS_KEPT_MAX = 64
"""Number of announced versions that are kept. If workers sample from older ones, the bound of the run is larger than
this."""


RUN_ENDED = "RUN_ENDED"
"""Reason of what ends unused with its run."""
VOID_VERSION = "VOID_VERSION"
"""Reason of samples whose weights were rolled back."""


class EpisodeStatus(IntEnum):
    PENDING = 1
    LEASED = 2
    SCORED = 3
    ENDED = 4


class GroupPhase(IntEnum):
    OPEN = 1
    FINALIZING = 2
    READY = 3
    LEASED = 4
    IN_DOUBT = 5
    APPLIED = 6


class EpisodeState(msgspec.Struct, kw_only=True):
    episode: str
    status: EpisodeStatus = EpisodeStatus.PENDING
    attempt: int = 0
    """Number of leases so far; the next lease is attempt + 1."""
    failures: int = 0
    """Number of attempts that count towards `tries_max`."""
    lease_id: str = ""
    """The last lease, also after it ended: a late report of it is accepted if no other worker has the episode."""
    node_id: str = ""
    cause: str = ""
    payload: PayloadRef = PayloadRef()


RESULTS_KEPT_MAX = 4096
"""Number of ended episodes of submitted tasks whose ends are kept for their applications."""


class EpisodeResult(msgspec.Struct, kw_only=True, frozen=True):
    """How an episode of a submitted task has ended, for the application that opened it. It outlives the group."""

    lease_id: str
    """Its last lease."""
    end: str = ""
    """`end_text` of an episode without samples; empty for a scored one."""
    sample_ids: tuple[str, ...] = ()
    rewards: dict[str, float] = {}
    """The rewards of its environment, as reported."""


class SampleOrigin(msgspec.Struct, kw_only=True, frozen=True):
    """The sample whose tokens a replayed sample has."""

    group: str
    sample_id: str


class SampleState(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    meta: SampleMeta
    """As reported, without the evidence of its rewards. A finalizer may change the rewards."""
    rewards_as_reported: bool = False
    """Whether no finalizer has replaced them."""
    episode: str
    origin: SampleOrigin | None = None
    """The original of a replayed sample; None for all others."""
    end: SampleEnd = SampleEnd.LIVE
    reason: str = ""

    @property
    def sample_id(self) -> str:
        return self.meta.sample_id

    @property
    def end_text(self) -> str:
        """Return "ready", or end and reason, as in `MemberOutcome.end`."""
        return "ready" if self.end is SampleEnd.LIVE else end_text(self.end, self.reason)


def end_text(end: SampleEnd, reason: str) -> str:
    """Return, for example, "stale/BEYOND_BOUND", or "trained" without a reason."""
    return f"{end.name.lower()}/{reason}" if reason else end.name.lower()


class GroupState(msgspec.Struct, kw_only=True):
    group: str
    number: int
    """Order of admission; batches take the lowest first."""
    purpose: Purpose
    policy: str
    task: Task
    draw: int
    update_intended: int
    step_min: int
    incarnation_min: int
    dead_id: int = 0
    """Dead letter whose task the group retries; 0 for a new draw."""
    phase: GroupPhase = GroupPhase.OPEN
    num_unfinished: int = 0
    """Number of episodes that are PENDING or LEASED."""
    episodes: dict[str, EpisodeState] = {}
    samples: dict[str, SampleState] = {}
    lease_id: str = ""
    """The batch lease while LEASED or IN_DOUBT."""
    update: int = 0
    """The update of its samples while APPLIED."""
    mean_abs_advantage: float = -1.0
    """As the trainer measured it in the update of the group; -1: it did not."""
    lost: bool = False
    """Whether the end of the run or a roll-back ended one of its episodes or samples."""
    submitted_key: str = ""
    """Key of the submitted samples that are its episodes; empty for a rollout."""
    source: str = ""
    """Their source, in lower case."""
    submitted_step: int = 0
    """Applied step when they were submitted."""
    given: tuple[bytes, ...] = ()
    """Their episodes, encoded, while one of them is unfinished."""
    size: int = 0
    """Number of episodes with which it began."""
    variants: tuple[Variant, ...] = ()
    """Variants of its episodes, see `plans.variant_of`."""
    propensity: float = 0.0
    """Probability with which the selector drew its task; 0: not stated."""
    together: str = ""
    """Name that it shares with the groups that belong to it; empty: none."""

    @property
    def unfinished(self) -> bool:
        return self.num_unfinished > 0

    def live_samples(self) -> Iterator[SampleState]:
        return (s for s in self.samples.values() if s.end is SampleEnd.LIVE)

    @property
    def num_live(self) -> int:
        """Number of live samples, with one reserved sample for each unfinished episode."""
        return self.num_unfinished + sum(1 for _ in self.live_samples())


class BatchState(msgspec.Struct, kw_only=True):
    """A batch lease that is held or in doubt."""

    lease_id: str
    trainer_epoch: int
    update: int
    groups: tuple[str, ...]
    sample_ids: tuple[str, ...]
    bound: Bound
    """The bound under which it was leased and is committed."""
    foreign: tuple[ForeignSource, ...] = ()
    """The bounds of submitted samples under which it was leased and is committed."""
    in_doubt: bool = False


class UpdateRecord(msgspec.Struct, kw_only=True):
    """A committed update: enough to roll back to it, and to recognize a repeated commit."""

    digest: str
    trainer_epoch: int = 0
    lease_ids: tuple[str, ...] = ()
    dropped: str = ""
    """`names_digest` of the dropped samples; empty for a skipped update, which drops all."""
    num_trained: int = 0
    """Number of its samples that have ended TRAINED, without replayed and submitted ones."""
    num_replayed: int = 0
    """The same of replayed samples."""
    foreign_trained: dict[str, int] = {}
    """The same of submitted samples, by source."""
    applied: bool = True


def names_digest(names: Iterable[str]) -> str:
    """Return a digest of a set of names; empty for an empty set."""
    ordered = sorted(names)
    return hashlib.sha256("\n".join(ordered).encode()).hexdigest() if ordered else ""


class RollBack(msgspec.Struct, kw_only=True, frozen=True):
    """Steps above `to_update` of every incarnation before `incarnation` are void."""

    incarnation: int
    to_update: int


class PolicyClock(msgspec.Struct, kw_only=True):
    """Applied and published steps of the policy, its trainer and its commits."""

    policy: str
    learner: str
    applied: int = 0
    published: PolicyVersion | None = None
    """The newest announced version of this incarnation."""
    versions: list[PolicyVersion] = []
    """The newest announced versions of all incarnations, oldest first."""
    incarnation: int = 0
    checkpoint: int = 0
    trainer_epoch: int = 0
    keeps_no_checkpoints: bool = False
    rollbacks: list[RollBack] = []
    updates: dict[int, UpdateRecord] = {}
    quarantined: list[PolicyVersion] = []
    refusals: dict[str, str] = {}
    """Causes for which the nodes rejected versions, by version; the newest of them."""
    trained_by_staleness: dict[int, int] = {}
    tokens_trained: int = 0
    tokens_generated: int = 0
    mean_rewards: dict[str, float] = {}
    """Mean over all scored members of the groups of the last committed update."""

    @property
    def digest(self) -> str:
        record = self.updates.get(self.applied)
        return record.digest if record else ""


REASON_CHARS_MAX = 64
"""Maximum length of a reason that is counted separately. Ledgers of older releases may have longer ones."""
REASONS_MAX = 256
"""Number of reasons that are counted separately. Later ones are counted together as `OTHER`, because the state of a run
must fit into a message."""
OTHER = "OTHER"
REWARD_NAMES_MAX = 256
"""Number of named rewards whose means a summary of many samples has, because the state of a run must fit into a
message."""


class SampleCounters(msgspec.Struct, kw_only=True):
    """Counts of samples: reserved = live + ends, at every moment. `live` is counted separately, so that a violation
    shows."""

    reserved: int = 0
    live: int = 0
    ends: dict[int, int] = {}
    reasons: dict[str, int] = {}

    def reserve(self, num: int) -> None:
        self.reserved += num
        self.live += num

    def end(self, end: SampleEnd, reason: str, num: int = 1) -> None:
        self.live -= num
        self.ends[end] = self.ends.get(end, 0) + num
        key = end_text(end, reason)
        if key not in self.reasons and reason and (len(self.reasons) >= REASONS_MAX or len(reason) > REASON_CHARS_MAX):
            key = end_text(end, OTHER)
        self.reasons[key] = self.reasons.get(key, 0) + num

    def void_trained(self, num: int) -> None:
        """Move `num` samples of an undone update from TRAINED to STALE: its checkpoint is lost, so no existing weights
        contain them."""
        if num == 0:
            return
        self.ends[SampleEnd.TRAINED] -= num
        self.reasons["trained"] -= num
        self.ends[SampleEnd.STALE] = self.ends.get(SampleEnd.STALE, 0) + num
        self.reasons["stale/ROLLED_BACK"] = self.reasons.get("stale/ROLLED_BACK", 0) + num

    @property
    def conserved(self) -> bool:
        return self.reserved == self.live + sum(self.ends.values())


class EvalState(msgspec.Struct, kw_only=True):
    """The evaluation of one (step, incarnation): sums over its scored samples."""

    step: int
    incarnation: int
    split: str
    num_reserved: int = 0
    num_samples: int = 0
    num_open: int = 0
    reward_sums: dict[str, float] = {}
    label_sums: dict[str, float] = {}
    label_nums: dict[str, int] = {}
    graded: bool = False
    """Whether a value of the run's success reward was neither 0 nor 1, so that its mean is not a share of solved
    tasks."""


class ReplayEntry(msgspec.Struct, kw_only=True):
    """A group in the replay log."""

    group: GroupState
    """The group when it was kept, with the samples that its replay needs."""
    sample_ids: tuple[str, ...]
    """Its samples that may be replayed."""
    advantage: float
    """Mean absolute advantage, see `replay_priorities.Worth`."""

    @property
    def num_bytes(self) -> int:
        """Size of its payloads."""
        return sum(episode.payload.size_bytes for episode in self.group.episodes.values())


class ReplayLog(msgspec.Struct, kw_only=True):
    """Groups that may be trained again, and the account of the replayed samples."""

    entries: dict[str, ReplayEntry] = {}
    """By the name of the group, oldest first."""
    num_bytes: int = 0
    """Sum of the sizes of their payloads."""
    left: dict[str, int] = {}
    """Number of groups that left the log: `capacity`, because it was full, or `bound`, because no later update may
    train a sample of them."""
    num_groups: int = 0
    """Number of replays; the number of the next one."""
    vanished: int = 0
    """Groups without an advantage that have ended since the last lease, see `replay_priorities.Advantage`."""
    failed_groups: dict[str, int] = {}
    """Number of the newest consecutive groups without a success, by task, see `replay_priorities.SuccessPerTask`."""
    counters: SampleCounters = msgspec.field(default_factory=SampleCounters)
    trained_by_staleness: dict[int, int] = {}
    tokens_trained: int = 0


class Replay(msgspec.Struct, kw_only=True, frozen=True):
    """The task of a dead letter that waits for admission."""

    dead_id: int
    task: Task
    draw: int


SUBMITTED_SCHEME = "submitted"
"""Scheme of the oracle references of submitted tasks with an answer key."""


def submitted_digest(task: Task, key: AnswerKey | None) -> str:
    """Return a digest of the content of a submitted task, with or without the reference that the run gave it."""
    given = "" if task.oracle_ref.startswith(f"{SUBMITTED_SCHEME}:") else task.oracle_ref
    content = msgspec.json.encode([msgspec.structs.replace(task, oracle_ref=given), key], order="sorted")
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def task_bytes(task: Task) -> int:
    """Return the size of a task in the state, bytes, rounded."""
    return len(msgspec.json.encode(task))


def key_bytes(key: AnswerKey | None) -> int:
    """Return the size of an answer key in the ledger, bytes, rounded."""
    return len(msgspec.json.encode(key)) if key is not None else 0


class OpenTask(msgspec.Struct, kw_only=True, frozen=True):
    """A submitted task that waits for admission."""

    task: Task
    num_bytes: int
    """`task_bytes`, and the size of its answer key when it was submitted."""


def samples_digest(group: SubmittedGroup, source: str, key: AnswerKey | None) -> str:
    """Return a digest of the content of submitted samples."""
    content = msgspec.msgpack.encode([submitted_digest(group.task, key), source, group.episodes])
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def samples_bytes(group: SubmittedGroup) -> int:
    """Return the size of submitted samples in the state, bytes, rounded."""
    return task_bytes(group.task) + sum(map(len, group.episodes))


class WaitingSamples(msgspec.Struct, kw_only=True, frozen=True):
    """A group of submitted samples that waits for admission."""

    group: SubmittedGroup
    source: str
    step: int
    """Applied step when it was submitted."""
    num_bytes: int
    """`samples_bytes`."""


class SourceAccount(msgspec.Struct, kw_only=True):
    """The account of a source of submitted samples."""

    groups: int = 0
    """Number of accepted groups."""
    dropped: int = 0
    """Number of groups that became too old before admission."""
    counters: SampleCounters = msgspec.field(default_factory=SampleCounters)
    """The samples of its admitted groups."""
    trained_by_age: dict[int, int] = {}
    tokens_trained: int = 0


class State(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Everything durable about one run. A snapshot with a field that this version does not have is rejected."""

    spec: RunSpec | None = None
    clock: PolicyClock | None = None
    groups: dict[str, GroupState] = {}
    batches: dict[str, BatchState] = {}
    num_batches: int = 0
    """Number of batches that were leased. It makes lease ids unique in the run."""
    released: list[str] = []
    """Released leases of the current trainer epoch, oldest first; the newest of them."""
    expired: list[str] = []
    """Leases that expired or were in doubt at or after the end of the run."""
    num_groups: int = 0
    """Number of training groups that were admitted; the number of the next one."""
    next_draw: int = 0
    pending: list[tuple[str, str]] = []
    """(group, episode) of training that waits for a worker. Retries are at the front."""
    pending_eval: list[tuple[str, str]] = []
    """(group, episode) of evaluation that waits for a worker. They are leased before training."""
    counters: SampleCounters = msgspec.field(default_factory=SampleCounters)
    eval_counters: SampleCounters = msgspec.field(default_factory=SampleCounters)
    evals: list[EvalState] = []
    replays: list[Replay] = []
    """Tasks of dead letters that wait for admission, before any fresh draw."""
    replayed: list[int] = []
    """Replayed dead letters, oldest first; the newest of them."""
    stall_root: str = ""
    """Root cause of the current stall; empty if the run is not stalled."""
    stall: str = ""
    """The recorded text of that stall."""
    stopping: str = ""
    """Why no further update begins. The run ends when its last weights are in a checkpoint and evaluated."""
    ended: str = ""
    submitted: dict[str, str] = {}
    """`submitted_digest` of every submitted task, by its id."""
    submitted_open: list[OpenTask] = []
    """Submitted tasks that wait for admission, in order of submission. Those that are drawn again are at the front."""
    submitted_open_bytes: int = 0
    """Sum of their sizes."""
    submitted_finished: bool = False
    """Whether no further tasks follow."""
    episode_results: dict[str, EpisodeResult] = {}
    """The ends of the newest ended episodes of submitted tasks, by id."""
    foreign: dict[str, SourceAccount] = {}
    """The accounts of the sources of submitted samples, by source."""
    foreign_keys: dict[str, str] = {}
    """`samples_digest` of every group of submitted samples, by its key."""
    foreign_waiting: dict[str, WaitingSamples] = {}
    """Groups of submitted samples that wait for admission, by key, in order of submission."""
    foreign_waiting_bytes: int = 0
    """Sum of their sizes."""
    seconds: float = 0.0
    """Counted seconds for which coordinators led the run."""
    last_change: str = ""
    """Id of the newest RunChanged."""
    archived: int = 0
    """Position of the last ledger record that is in an archive segment."""
    num_segments: int = 0
    """Number of sealed archive segments."""
    replay: ReplayLog = msgspec.field(default_factory=ReplayLog)

    @property
    def the_spec(self) -> RunSpec:
        assert self.spec is not None, "a run begins with RunCreated"
        return self.spec

    @property
    def the_clock(self) -> PolicyClock:
        assert self.clock is not None, "a run begins with RunCreated"
        return self.clock

    @property
    def reopens(self) -> bool:
        """Whether the run has ended, and a change of its limits reopens it: a client did not stop it."""
        return bool(self.ended) and not self.ended.startswith("STOPPED")

    @property
    def submissions_done(self) -> bool:
        """Whether clients submit the tasks of the run, none follows, and none waits."""
        return self.the_spec.submitted_tasks and self.submitted_finished and not self.submitted_open

    def pending_of(self, purpose: Purpose) -> list[tuple[str, str]]:
        return self.pending_eval if purpose is Purpose.EVAL else self.pending

    def counters_of(self, group: GroupState, sample: SampleState | None = None) -> SampleCounters:
        """Return the counters of a sample of a group, or of its reservations: those of evaluations, of replay, of its
        source, or of training."""
        if group.purpose is Purpose.REPLAY or (sample is not None and sample.origin is not None):
            return self.replay.counters
        if group.purpose is Purpose.EVAL:
            return self.eval_counters
        return self.foreign[group.source].counters if group.source else self.counters

    def training_groups(self, *phases: GroupPhase) -> list[GroupState]:
        """Return training groups in one of `phases`, in order of admission."""
        return self._groups((Purpose.TRAIN, Purpose.EXPORT), phases)

    def replayed_groups(self, *phases: GroupPhase) -> list[GroupState]:
        """Return groups of the replay log that are trained again, in the order in which they were chosen."""
        return self._groups((Purpose.REPLAY,), phases)

    def learner_groups(self, *phases: GroupPhase) -> list[GroupState]:
        """Return both."""
        return self.training_groups(*phases) + self.replayed_groups(*phases)

    def _groups(self, purposes: tuple[Purpose, ...], phases: tuple[GroupPhase, ...]) -> list[GroupState]:
        chosen = (g for g in self.groups.values() if g.purpose in purposes and g.phase in phases)
        return sorted(chosen, key=lambda g: g.number)

    def eval_of(self, step: int, incarnation: int) -> EvalState | None:
        """Return the evaluation of a version if it is kept."""
        return next((e for e in self.evals if (e.step, e.incarnation) == (step, incarnation)), None)

    def open_evals(self) -> list[EvalState]:
        return [e for e in self.evals if e.num_open]

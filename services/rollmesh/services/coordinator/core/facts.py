"""The facts of the ledger and the values in them. Generated from events.proto by .ci/facts.py; do not edit."""

from __future__ import annotations

from enum import IntEnum

import msgspec

from rollmesh.services.coordinator.core.records import Record, RunSpec
from rollmesh.shared.domain.plans import Variant
from rollmesh.shared.domain.versions import PolicyVersion


class RunCreated(Record, frozen=True, kw_only=True, tag=True):
    """A run began."""

    spec: RunSpec


class Purpose(IntEnum):
    """Purpose of an episode."""

    TRAIN = 1
    EVAL = 2
    EXPORT = 3
    REPLAY = 4


class Message(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Text view of a turn, for display and judges. It is never the source of trained tokens."""

    role: str = ""
    content: str = ""


class Task(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The public part of a task. The answer key is not here: only the reward service resolves `oracle_ref`."""

    task_id: str = ""
    messages: tuple[Message, ...] = ()
    tools: tuple[str, ...] = ()
    oracle_ref: str = ""
    split: str = ""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    agent: str = ""
    scorers: tuple[str, ...] = ()
    extras: dict[str, str] = msgspec.field(default_factory=dict)


class GroupReserved(Record, frozen=True, kw_only=True, tag=True):
    """A group was admitted: its samples are reserved, one per episode."""

    group: str
    purpose: Purpose
    policy: str = ""
    task: Task = Task()
    draw: int = 0
    num_episodes: int = 0
    update_intended: int = 0
    step_min: int = 0
    incarnation_min: int = 0
    dead_id: int = 0
    submitted_key: str = ""
    variants: tuple[Variant, ...] = ()
    propensity: float = 0.0
    together: str = ""


class EpisodesAdded(Record, frozen=True, kw_only=True, tag=True):
    """A finalizer extended a group by further episodes."""

    group: str
    num_episodes: int = 0


class EpisodeLeased(Record, frozen=True, kw_only=True, tag=True):
    """An episode was leased."""

    group: str
    episode: str
    attempt: int = 0
    lease_id: str
    node_id: str = ""


class EpisodeReturned(Record, frozen=True, kw_only=True, tag=True):
    """The lease of an episode ended without a result. The episode waits for a worker again."""

    group: str
    episode: str
    counts: bool = False
    cause: str = ""


class SampleEnd(IntEnum):
    """The terminal state of a sample. Each sample has at most one. At every moment, reserved = live + the sum of all
    ends."""

    LIVE = 0
    TRAINED = 1
    STALE = 2
    FILTERED = 3
    FAILED = 4
    CANCELLED = 5
    EXPORTED = 6


class EpisodeEnded(Record, frozen=True, kw_only=True, tag=True):
    """An episode ended without samples. Its reserved sample ends with it."""

    group: str
    episode: str
    end: SampleEnd
    reason: str = ""
    cause: str = ""


class PayloadRef(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Position of a payload."""

    sequence: int = 0
    size_bytes: int = 0


class StepSpan(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Number of trainable tokens of a sample by the weights that sampled them. The staleness bound is computed from
    it."""

    step: int = 0
    incarnation: int = 0
    num_tokens: int = 0


class RewardOutcome(IntEnum):
    """Whether a reward is a result of the model."""

    OK = 1
    INFRA_FAILURE = 2
    NOT_APPLICABLE = 3


class Reward(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One named value of a sample or of one of its segments. Rewards are stored separately, so that their weights can
    change without new rollouts."""

    name: str = ""
    value: float = 0.0
    segment: int = 0
    scorer: str = ""
    evidence: str = ""
    outcome: RewardOutcome = RewardOutcome.OK
    answer: str = ""


class FinishReason(IntEnum):
    """Why generation of a segment ended."""

    UNFINISHED = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    ERROR = 4


class TurnSummary(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One turn of a sample: the segments of one action, from the first to the one that has a finish reason."""

    segment: int = 0
    num_tokens: int = 0
    mean_logprob: float = 0.0
    observation: str = ""


class SampleSummary(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A sample as its group sees it, without its payload."""

    role: str = ""
    finish: FinishReason = FinishReason.UNFINISHED
    turns: tuple[TurnSummary, ...] = ()
    text: str = ""
    greedy: bool = False
    variant: str = ""


class SegmentSource(IntEnum):
    """Source of a segment. Only POLICY and PEER tokens were sampled. The staleness bound applies to POLICY tokens.
    Every other source has separate bounds and counters."""

    POLICY = 1
    PROMPT = 2
    TOOL = 3
    HINT = 4
    SUMMARY = 5
    DATASET = 6
    REPLAY = 7
    REWRITTEN = 8
    PEER = 9
    HUMAN = 10


class ExternalSpan(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Number of trained tokens of a sample of one source that is not POLICY."""

    source: SegmentSource = SegmentSource.POLICY
    num_tokens: int = 0


class SampleMeta(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Metadata of a sample, as the rollout worker reported it to the coordinator. Payloads stay in the sample stream.
    Every reader of a payload compares all fields with it (METADATA_MISMATCH), except for the evidence, scorer and
    answer of rewards. Rewards are compared if LeasedSample.rewards_as_reported is set."""

    sample_id: str = ""
    policy: str = ""
    leaf: int = 0
    steps: tuple[StepSpan, ...] = ()
    num_tokens: int = 0
    rewards: tuple[Reward, ...] = ()
    trainable: bool = True
    num_sampled_tokens: int = 0
    summary: SampleSummary = SampleSummary()
    external: tuple[ExternalSpan, ...] = ()


class EpisodeScored(Record, frozen=True, kw_only=True, tag=True):
    """The samples of an episode are scored and wait for their group. The first uses the reservation of the episode.
    Each further sample is reserved by this fact."""

    group: str
    episode: str
    payload: PayloadRef = PayloadRef()
    samples: tuple[SampleMeta, ...] = ()


class GroupDecision(IntEnum):
    """The decision of the finalizers on a group."""

    KEEP = 1
    FILTER = 2
    EXTEND = 3


class SampleRewards(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Rewards of one sample."""

    sample_id: str = ""
    rewards: tuple[Reward, ...] = ()


class GroupFinalized(Record, frozen=True, kw_only=True, tag=True):
    """A group was decided on. SamplesEnded before it in the same record ends the members that the finalizers
    dropped."""

    group: str
    decision: GroupDecision
    reason: str = ""
    adjusted: tuple[SampleRewards, ...] = ()
    members: tuple[SampleRewards, ...] = ()


class SamplesEnded(Record, frozen=True, kw_only=True, tag=True):
    """Samples ended outside an update."""

    sample_ids: tuple[str, ...] = ()
    end: SampleEnd
    reason: str = ""
    group: str


class TrainerAttached(Record, frozen=True, kw_only=True, tag=True):
    """A trainer attached. Older epochs are fenced."""

    policy: str = ""
    learner: str = ""
    trainer_epoch: int = 0
    last_update: int = 0
    holder: str = ""
    keeps_no_checkpoints: bool = False


class BatchLeased(Record, frozen=True, kw_only=True, tag=True):
    """A batch was leased."""

    lease_id: str
    policy: str = ""
    learner: str = ""
    trainer_epoch: int = 0
    update: int = 0
    groups: tuple[str, ...] = ()
    sample_ids: tuple[str, ...] = ()


class BatchReturned(Record, frozen=True, kw_only=True, tag=True):
    """A batch lease ended unused. Its samples are READY again."""

    lease_id: str
    reason: str = ""


class BatchInDoubt(Record, frozen=True, kw_only=True, tag=True):
    """A batch lease expired or was fenced. The use of its samples is unknown until the next attach."""

    lease_id: str
    reason: str = ""


class DroppedSample(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A leased sample that a trainer excluded from its update."""

    sample_id: str = ""
    reason: str = ""


class TrainedGroup(Record, frozen=True, kw_only=True, omit_defaults=True):
    """What an update measured on one group of its batch. The trainer writes it. Fields 2 to 4 are the measures of
    releases before the field `measures`. A reader takes them if `measures` is empty. A writer SHOULD set them beside
    `measures`, for readers of such a release."""

    group: str = ""
    mean_abs_advantage: float = 0.0
    policy_loss: float = 0.0
    num_tokens: int = 0
    measures: dict[str, float] = msgspec.field(default_factory=dict)


class UpdateCommitted(Record, frozen=True, kw_only=True, tag=True):
    """An update was committed: its used samples are APPLIED."""

    policy: str = ""
    learner: str = ""
    trainer_epoch: int = 0
    update: int = 0
    incarnation: int = 0
    lease_ids: tuple[str, ...] = ()
    used: tuple[str, ...] = ()
    dropped: tuple[DroppedSample, ...] = ()
    applied: bool = True
    digest: str = ""
    groups: tuple[TrainedGroup, ...] = ()


class CheckpointReported(Record, frozen=True, kw_only=True, tag=True):
    """A checkpoint with this update is durable. Applied samples up to it are TRAINED."""

    policy: str = ""
    learner: str = ""
    update: int = 0


class RolledBack(Record, frozen=True, kw_only=True, tag=True):
    """Updates above `to_update` are undone. Their APPLIED samples are READY again. Their TRAINED samples count as
    stale(ROLLED_BACK)."""

    policy: str = ""
    learner: str = ""
    to_update: int = 0
    incarnation: int = 0


class VersionPublished(Record, frozen=True, kw_only=True, tag=True):
    """A trainer published weights: they are announced to the nodes."""

    version: PolicyVersion


class VersionQuarantined(Record, frozen=True, kw_only=True, tag=True):
    """The first nodes could not load a version, or its probe scores did not match. No node activates it."""

    version: PolicyVersion
    cause: str = ""


class RunEnded(Record, frozen=True, kw_only=True, tag=True):
    """A run ended."""

    reason: str = ""


class RunStalled(Record, frozen=True, kw_only=True, tag=True):
    """No progress for `stall_s`: no sample was scored, no group decided on, no update committed, no checkpoint
    reported, no version published. Written once per stall, and again if its root cause changes. The next progress ends
    the stall."""

    root: str = ""
    cause: str = ""
    stalled_s: float = 0.0


class TaskReplayed(Record, frozen=True, kw_only=True, tag=True):
    """The task of a dead letter waits for admission. A GroupReserved with its `dead_id` follows."""

    dead_id: int = 0
    task: Task = Task()
    draw: int = 0


class TimeCounted(Record, frozen=True, kw_only=True, tag=True):
    """Time for which a coordinator led the run since the previous such fact, by its monotonic clock. At most ten
    seconds that a killed coordinator had not counted are omitted."""

    seconds: float = 0.0


class RunStopping(Record, frozen=True, kw_only=True, tag=True):
    """A limit was reached, so no further update begins. The run ends when its last weights are in a checkpoint,
    published and evaluated. A roll-back or a RunChanged revokes this."""

    reason: str = ""


class ConfigChange(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One changed setting."""

    key: str = ""
    old: str = ""
    new: str = ""


class RunChanged(Record, frozen=True, kw_only=True, tag=True):
    """The settings of a run changed. A run that had ended at a limit is open again."""

    change_id: str = ""
    changes: tuple[ConfigChange, ...] = ()
    spec: RunSpec
    reopened: bool = False


class AnswerKey(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The private part of a submitted task. Only the reward service reads it, and gives it to scorers. No worker,
    sandbox, model or trainer gets it. At least one of `answers`, `tests` and `record` MUST be set."""

    task_id: str = ""
    answers: tuple[str, ...] = ()
    tests: str = ""
    record: str = ""


class TasksSubmitted(Record, frozen=True, kw_only=True, tag=True):
    """Clients submitted tasks, or declared that no further ones follow. Each waits for admission; a GroupReserved with
    it follows. Tasks that were submitted before are omitted."""

    submission: str = ""
    tasks: tuple[Task, ...] = ()
    answer_keys: tuple[AnswerKey, ...] = ()
    finish: bool = False


class ReplayedSample(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A new sample of the tokens of an earlier one."""

    sample_id: str = ""
    original_id: str = ""
    steps: tuple[StepSpan, ...] = ()


class SamplesReplayed(Record, frozen=True, kw_only=True, tag=True):
    """Samples of the replay log were chosen for the next batch. Each is a new sample, which the account of replayed
    samples reserves, with the tokens, versions, log-probs and rewards of its original. It is READY, and ends as other
    samples do."""

    group: str
    original_group: str = ""
    samples: tuple[ReplayedSample, ...] = ()
    update: int = 0


class ArchiveSealed(Record, frozen=True, kw_only=True, tag=True):
    """Records of this ledger are in an archive segment: a durable, verified file of the run folder. The stream no
    longer keeps them, so it begins after them. A record with this fact has format 2."""

    number: int = 0
    first: int = 0
    last: int = 0
    sha256: str = ""
    size_bytes: int = 0


class SubmittedGroup(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One group of submitted samples."""

    key: str = ""
    task: Task = Task()
    episodes: tuple[bytes, ...] = ()


class Provenance(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Where submitted samples come from. Informational."""

    mesh: str = ""
    run: str = ""
    step: int = 0


class SamplesSubmitted(Record, frozen=True, kw_only=True, tag=True):
    """Clients submitted samples of one source. Each group waits for admission; a GroupReserved with its key follows, or
    SubmittedSamplesDropped. Groups that were submitted before are omitted."""

    submission: str = ""
    source: SegmentSource
    groups: tuple[SubmittedGroup, ...] = ()
    answer_keys: tuple[AnswerKey, ...] = ()
    provenance: Provenance = Provenance()


class SubmittedSamplesDropped(Record, frozen=True, kw_only=True, tag=True):
    """Groups of submitted samples were older than the bound of their source before they were admitted. They have no
    samples."""

    keys: tuple[str, ...] = ()


Fact = (
    RunCreated
    | GroupReserved
    | EpisodesAdded
    | EpisodeLeased
    | EpisodeReturned
    | EpisodeEnded
    | EpisodeScored
    | GroupFinalized
    | SamplesEnded
    | TrainerAttached
    | BatchLeased
    | BatchReturned
    | BatchInDoubt
    | UpdateCommitted
    | CheckpointReported
    | RolledBack
    | VersionPublished
    | VersionQuarantined
    | RunEnded
    | RunStalled
    | TaskReplayed
    | TimeCounted
    | RunStopping
    | RunChanged
    | TasksSubmitted
    | SamplesReplayed
    | ArchiveSealed
    | SamplesSubmitted
    | SubmittedSamplesDropped
)

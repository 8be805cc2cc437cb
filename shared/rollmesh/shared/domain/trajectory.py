"""The domain types of an episode: segments, samples, rewards, as in `rollmesh/v1/types.proto`.

An episode is a tree of segments; a sample is the path from a root to one leaf segment. A shared prefix is stored once.
Token ids are never encoded again from text, so that training uses exactly the sampled tokens.
The types are converted to and from protobuf in `rollmesh.shared.codec.trajectory`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, ClassVar

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from rollmesh.shared.domain.versions import PolicyVersion

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
MaskArray = NDArray[np.uint8]
Columns = Mapping[str, NDArray[Any]]
"""Named arrays with one entry [n] or one row [n, k] per token."""

ROOT = -1
WHOLE_SAMPLE = -1


class Role(IntEnum):
    """What a segment is to the policy. Numbers equal `rollmesh.v1.SegmentRole`."""

    CONTEXT = 1
    OBSERVATION = 2
    ACTION = 3


class Source(IntEnum):
    """Origin of the tokens. Numbers equal `rollmesh.v1.SegmentSource`."""

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


SAMPLED_SOURCES = frozenset({Source.POLICY, Source.PEER})
"""Sources whose tokens were drawn from a distribution, so that they have log-probs."""


class FinishReason(IntEnum):
    """Why generation of a segment ended. Numbers equal `rollmesh.v1.FinishReason`."""

    UNFINISHED = 0
    """The sequence continues in a child segment, because weights changed or another node took over."""
    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    ERROR = 4


class Outcome(IntEnum):
    """Whether a reward says something about the model. Numbers equal `rollmesh.v1.RewardOutcome`."""

    OK = 1
    INFRA_FAILURE = 2
    NOT_APPLICABLE = 3


class Purpose(IntEnum):
    """What an episode is for. Numbers equal `rollmesh.v1.Purpose`."""

    TRAIN = 1
    EVAL = 2
    EXPORT = 3
    REPLAY = 4
    """The account of replayed samples. No episode has it."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn. Log-probs returned are under exactly this distribution.

    Sampling is keyed by (seed, absolute position): a request resumed elsewhere from its received tokens draws the same.
    """

    temperature: float = 1.0
    """0 means greedy (log-probs are then those of the plain model)."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means off."""
    max_tokens: int = 256
    """Most new tokens of this request."""
    stop: tuple[str, ...] = ()
    """Generation ends after the first of these strings appears in the new text; the string is kept."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends after the first of these ids; the id is kept. The tokenizer's eos is not implied."""
    seed: int = 0


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Text view of a turn, for display and judges. Trained tokens never come from it."""

    role: str
    content: str


def oldest_kv_step(steps: Iterable[int], version: PolicyVersion) -> int:
    """Return which of the steps behind keys and values is of the oldest weights, for tokens of `version`.

    Steps above that of the version are of weights that a roll-back has made void, which are older than those of the
    version."""
    return min(steps, key=lambda step: (step <= version.step, step))


class ToolOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a tool call ended."""

    name: str = ""
    """Name of the tool; empty if the model named no tool of the task."""
    ok: bool
    error: str = ""
    """Kind of the error: MALFORMED_CALL, UNKNOWN_TOOL, or the name of an `ExecOutcome` such as TIME_LIMIT. Empty if
    `ok`."""
    wall_s: float = 0.0
    """Seconds that the agent waited."""


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive tokens with one source and, if sampled, one set of weights.

    `logprobs` [n] are under the distribution sampled from, natural log, present exactly for sampled (POLICY, PEER)
    spans. `logprobs_model` [n] are under the plain softmax of the model (temperature 1, no truncation), if the engine
    gives them. `loss_mask` [n] is 1 where a token may be trained on; None means none of them. `version` and
    `kv_step_oldest` are set by the engine only: the weights that sampled the span, and the step of the oldest weights
    behind the key-value cache it attended to. `arrays` are further outputs of the engine, by name, as the run requested
    them.
    """

    parent: int
    role: Role
    source: Source
    token_ids: IntArray
    logprobs: FloatArray | None = None
    logprobs_model: FloatArray | None = None
    loss_mask: MaskArray | None = None
    version: PolicyVersion | None = None
    kv_step_oldest: int | None = None
    sampling: int = -1
    """Index into `Episode.sampling_params`; -1 where nothing was sampled."""
    finish: FinishReason = FinishReason.UNFINISHED
    arrays: Columns = msgspec.field(default_factory=dict)
    messages: tuple[Message, ...] = ()
    """Text of the turns that end with this segment; `text_view` joins those of a path."""
    tool: ToolOutcome | None = None
    """How the tool call ended whose result the segment shows."""

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_trainable(self) -> int:
        return 0 if self.loss_mask is None else int(self.loss_mask.sum())


def sampled_segment(
    token_ids: IntArray,
    logprobs: FloatArray,
    version: PolicyVersion,
    *,
    kv_step_oldest: int,
    logprobs_model: FloatArray | None = None,
    arrays: Columns | None = None,
) -> Segment:
    """Return an action of the policy as an engine reports it, without its place in an episode."""
    return Segment(
        parent=ROOT,
        role=Role.ACTION,
        source=Source.POLICY,
        token_ids=token_ids,
        logprobs=logprobs,
        logprobs_model=logprobs_model,
        version=version,
        kv_step_oldest=kv_step_oldest,
        arrays=arrays or {},
    )


class Reward(msgspec.Struct, frozen=True, kw_only=True):
    """One named number about a sample or one of its segments, with the evidence for it. Never aggregated here."""

    name: str
    value: float
    segment: int = WHOLE_SAMPLE
    scorer: str = ""
    """Name and version of the scorer, e.g. `exact@1`."""
    evidence: str = ""
    outcome: Outcome = Outcome.OK
    answer: str = ""
    """The answer that the scorer found in the text of the model, as it compared it. Empty if it found none."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One training item: the path from the root to `leaf`."""

    sample_id: str
    leaf: int
    role: str = ""
    """Role in a game or team; empty for a lone agent."""
    policy: str = "main"
    rewards: tuple[Reward, ...] = ()
    weight: float = 1.0
    """Factor of its tokens in the loss. Tokens shared with another sample of the episode are trained in both."""
    trainable: bool = True
    finish: FinishReason = FinishReason.UNFINISHED
    """Why it ended: as its last action did, or LENGTH where a limit of the episode ended it."""


class EndpointUse(msgspec.Struct, frozen=True, kw_only=True):
    """What one caller in an episode asked of one endpoint. All numbers are sums over the answers."""

    SUMS: ClassVar[tuple[str, ...]] = (
        "calls",
        "replayed",
        "prompt_tokens",
        "completion_tokens",
        "price",
        "latency_s",
    )
    """The fields that are sums."""

    endpoint: str
    caller: str = ""
    """`agent`, or the scorer as in `Reward.scorer`."""
    calls: int = 0
    """Number of answers."""
    replayed: int = 0
    """Number of recorded ones among them."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    price: float = 0.0
    """Price of the responses of the server, also of those that failed the request, in the currency of the table of
    endpoints."""
    latency_s: float = 0.0
    """Seconds that the caller waited."""
    model: str = ""
    """The model that gave the last answer."""

    def plus(self, other: EndpointUse) -> EndpointUse:
        """Return the sum of two uses of the same endpoint by the same caller."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in self.SUMS}
        return EndpointUse(endpoint=self.endpoint, caller=self.caller, model=other.model or self.model, **sums)


class ClientChains(msgspec.Struct, frozen=True, kw_only=True):
    """The conversations of an episode whose model was served over the OpenAI protocol."""

    begun: Mapping[str, int] = {}
    """Number of conversations by cause: first, other, history (changed by the client), tools (other ones)."""
    continued: int = 0
    """Number of requests that continued recorded tokens."""
    forks: int = 0
    """Number of turns after a prefix that another turn already continues."""
    reencoded_tokens: int = 0
    """Tokens of conversations that began with recorded turns, which were encoded again."""

    def plus(self, other: ClientChains) -> ClientChains:
        """Return the sum of both."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__[1:]}
        return ClientChains(begun=Counter(self.begun) + Counter(other.begun), **sums)


class EpisodeKey(msgspec.Struct, frozen=True, kw_only=True):
    """Where an episode belongs: run, task, group, episode, and which try this is (1, 2, ...)."""

    run: str
    task: str
    group: str
    episode: str
    attempt: int = 1


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """One run of an agent on a task: what the sample stream carries."""

    key: EpisodeKey
    purpose: Purpose = Purpose.TRAIN
    segments: tuple[Segment, ...] = ()
    sampling_params: tuple[SamplingParams, ...] = ()
    samples: tuple[Sample, ...] = ()
    stage_s: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Seconds spent per stage: init, run, generate, logprobs, tool, ask, score."""
    traceparent: str = ""
    endpoints: tuple[EndpointUse, ...] = ()
    """What the agent and the scorers asked of endpoints, of the attempt that completed."""
    chains: ClientChains | None = None
    """The conversations of its clients; None if the model was not served to clients."""
    variant: str = ""
    """Name of its variant, as in its lease; empty without one."""

    def path(self, leaf: int) -> tuple[int, ...]:
        """Indices of the segments from the root to `leaf`, in order."""
        chain: list[int] = []
        index = leaf
        while index != ROOT:
            chain.append(index)
            index = self.segments[index].parent
            if len(chain) > len(self.segments):
                raise ValueError(f"segment {leaf} of episode {self.key.episode} has a cycle in its parents")
        return tuple(reversed(chain))

    def path_segments(self, sample: Sample) -> tuple[Segment, ...]:
        return tuple(self.segments[i] for i in self.path(sample.leaf))

    def oldest_step(self, sample: Sample) -> int | None:
        """Return the oldest step among the sample's trained POLICY tokens of its policy; None without such tokens."""
        return oldest_trained_step(self.path_segments(sample), policy=sample.policy)


def text_view(path: Iterable[Segment]) -> tuple[Message, ...]:
    """The text of a path. A forced beginning of an answer and what was sampled after it are one message."""
    view: list[Message] = []
    forced = False
    for segment in path:
        for message in segment.messages:
            continued = forced and segment.role is Role.ACTION
            beginning = view.pop().content if continued else ""
            view.append(replace(message, content=beginning + message.content) if beginning else message)
            forced = segment.role is Role.ACTION and segment.source is not Source.POLICY
    return tuple(view)


def oldest_trained_step(segments: Sequence[Segment], *, policy: str) -> int | None:
    """The step that the staleness bound is about: oldest among trained POLICY tokens sampled by `policy`."""
    steps = [
        s.version.step
        for s in segments
        if s.source is Source.POLICY and s.version is not None and s.version.policy == policy and s.num_trainable
    ]
    return min(steps, default=None)


class TurnSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a sample: the segments of one action, from the first to the one that has a finish reason."""

    segment: int
    """Index of its last segment in the episode. A reward of a segment is one of the first turn whose index is not
    smaller."""
    num_tokens: int
    """Number of tokens that the policy sampled."""
    mean_logprob: float
    """Mean behavior log-prob of these tokens, natural log; 0 without tokens."""
    observation: str = ""
    """Digest of the token ids between the turn before, or the beginning of the sample, and this turn. Equal
    observations have equal digests."""


class SampleSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A sample as its group sees it, without its payload."""

    role: str = ""
    finish: FinishReason = FinishReason.UNFINISHED
    turns: tuple[TurnSummary, ...] = ()
    text: str = ""
    """End of the text of its turns, which an empty line separates, at most `rollout.summary_text_chars` characters.
    Empty by default."""
    greedy: bool = False
    """Whether the policy sampled tokens of it, all at temperature 0."""
    variant: str = ""
    """Name of the variant of its episode; empty without one."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(turn.num_tokens for turn in self.turns)

    @property
    def mean_logprob(self) -> float:
        """Mean behavior log-prob of the sampled tokens; 0 without tokens."""
        return sum(turn.num_tokens * turn.mean_logprob for turn in self.turns) / max(1, self.num_tokens)

    def turn_of(self, segment: int) -> int | None:
        """Return the number of the turn that a reward of `segment` belongs to, from 0. After the last turn of the
        summary, it is that turn. None without turns."""
        numbers = (number for number, turn in enumerate(self.turns) if turn.segment >= segment)
        return next(numbers, len(self.turns) - 1 if self.turns else None)


NO_SUMMARY = SampleSummary()


class MemberOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One scored member of a group, trained or not: dropping members before the advantage would bias the baseline."""

    sample_id: str
    rewards: tuple[Reward, ...]
    end: str
    """`ready`, or the typed reason it ended for, e.g. `stale`, `filtered`."""
    episode: str = ""
    """Its episode, of which it may be one of several samples; empty: the sample is an episode by itself."""
    summary: SampleSummary = NO_SUMMARY

    @property
    def answer(self) -> str:
        """The first answer that a scorer found; empty if none did."""
        return next((reward.answer for reward in self.rewards if reward.answer), "")


class GroupContext(msgspec.Struct, frozen=True, kw_only=True):
    """Every scored member of a group: its rewards, the reason it ended for, and its summary."""

    group: str
    task: str
    members: tuple[MemberOutcome, ...]
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Labels of the task whose values have at most 64 characters."""
    propensity: float = 0.0
    """Probability with which the selector drew the group; 0: it did not state it."""


TRAINED_MEASURES = ("mean_abs_advantage", "policy_loss", "num_tokens")
"""Names of the numbers that each trainer of this release measures on a group, see `TrainedGroup`."""


class TrainedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """What an update measured on one group of its batch, as in `rollmesh/v1/events.proto`."""

    group: str
    measures: Mapping[str, float]
    """Name -> finite number. Those of `TRAINED_MEASURES` are means and a count over the used tokens. Others come from
    the estimator, see `Estimate.measures`."""

    @property
    def mean_abs_advantage(self) -> float:
        """Mean of the absolute advantage, >= 0. 0 if it was not measured, as for the other two."""
        return self.measures.get("mean_abs_advantage", 0.0)

    @property
    def policy_loss(self) -> float:
        """Mean of -r A: A is the advantage, and r the ratio pi / mu before the first optimizer step on the token,
        without a clip."""
        return self.measures.get("policy_loss", 0.0)

    @property
    def num_tokens(self) -> int:
        """Number of used tokens, >= 1. A token that several optimizer steps train counts once."""
        return int(self.measures.get("num_tokens", 0))


class TrainingSample(msgspec.Struct, frozen=True, kw_only=True):
    """What a learner trains on: a sample, the path of segments it covers, and its group.

    `segments` is the path in order; the mask of tokens beyond the bound (`LeasedSample.mask_below_step`) is already
    part of each segment's `loss_mask`.
    """

    sample: Sample
    segments: tuple[Segment, ...]
    group: str
    task: str
    staleness: int | None
    """Staleness for the update it was leased for; None if it trains on no POLICY token."""
    episode: str = ""
    """Its episode, as in `MemberOutcome`."""
    sampling_params: tuple[SamplingParams, ...] = ()
    """What `Segment.sampling` indexes into; a segment whose index is outside was sampled at temperature 1,
    untruncated."""
    indices: tuple[int, ...] = ()
    """Index in the episode of each segment, which `Reward.segment` refers to. Empty: 0, 1, 2, ..."""

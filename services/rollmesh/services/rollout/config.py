"""Settings of a rollout node: which agent acts, how it samples, and the limits of everything it may use."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rollmesh.shared.clients.inference_nodes import RouterConfig
from rollmesh.shared.clients.reward import RewardClientConfig
from rollmesh.shared.clients.sandbox import SandboxClientConfig
from rollmesh.shared.registry import Extension
from rollmesh.shared.settings import LIVE, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Settings

ToolCallBody = Literal["bare", "json"]


class FormatConfig(Settings):
    """Changes to the words of the conversation. What is unset comes from the model's chat template and its eos tokens."""

    turn_end: str | None = None
    """Ends an assistant turn; generation stops there. Must be what the chat template writes after one."""
    tool_call_start: str | None = None
    """Opens a tool call. Empty: the whole turn is the call."""
    tool_call_end: str | None = None
    """Closes a tool call; the end of the turn follows."""
    tool_call_body: ToolCallBody | None = None
    """What stands inside: `bare` is the text for the task's first tool, `json` is {"name": ..., "arguments": {...} or text}."""
    observation: str | None = None
    """What is appended after a turn to show the model a tool's result, up to where its next turn begins. Tags count around `{text}`
    only: the text itself is encoded without special tokens, so a tool's output cannot open a turn."""
    tool_role: str = "tool"
    """Role of an observation in the text view of the episode."""
    assistant_role: str = "assistant"
    """Role of the policy in the text view of the episode."""

    def check_fields(self) -> None:
        if self.observation is not None and self.observation.count("{text}") != 1:
            raise ValueError(f"`observation` must contain {{text}} exactly once, got {self.observation!r}")
        if self.turn_end == "":
            raise ValueError("`turn_end` must not be empty, got ''; remove the key to take it from the chat template")


class SamplingConfig(Settings):
    """How tokens are drawn unless the agent asks for something else."""

    temperature: Annotated[float, Meta(ge=0, le=10)] = 1.0
    """0 is greedy. Off-policy corrections assume that training samples at 1 without truncation."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Nucleus mass; 1 is off."""
    top_k: NonNegativeInt = 0
    """Number of most probable tokens kept; 0 is off."""
    max_tokens: PositiveInt = 256
    """Most new tokens of one turn."""


class LimitsConfig(Settings):
    """Limits of one episode. Reaching one is the model's doing: the episode ends, is scored and may be trained on."""

    turns_max: PositiveInt = 16
    """Most generations."""
    tokens_max: PositiveInt = 4096
    """Most sampled tokens, over all turns and branches."""
    context_tokens_max: PositiveInt = 1024
    """Longest sequence, prompt and observations included; at most what the engine holds (`context_max`, by default the same)."""
    run_s_max: PositiveFloat = 600.0
    """Longest time in the RUN stage, seconds."""
    observation_chars_max: Annotated[int, Meta(ge=16)] = 4096
    """Longest observation, characters; the middle of a longer one is cut out and marked."""
    segments_max: PositiveInt = 1024
    """Most segments of the tree."""


class ToolConfig(Settings):
    """Where a tool named by a task runs, and how the prompt describes it."""

    profile: str
    """Sandbox profile of the session it runs in. Tools of one profile share the episode's session."""
    function: str = ""
    """Function of the profile that gets the text; empty means that the text is code, run in the session."""
    language: str = "python"
    """Language of that code: python, bash, c, cpp, javascript, sqlite, duckdb. Those the sandbox has are listed by its error."""
    arguments: tuple[str, ...] = ()
    """What every run gets as arguments; of sqlite and duckdb the path of the database file in the session."""
    description: str = ""
    """What the prompt says about it. Empty: the docstring of the profile's function."""
    parameters: dict[str, Any] = {}
    """JSON schema of its arguments in the prompt. Empty: from the signature of the profile's function."""

    def check_fields(self) -> None:
        if self.function and (self.language != "python" or self.arguments):
            raise ValueError(
                f"`function` must be empty for code in a language, got {self.function!r} with {self.language!r}"
            )


def _default_tools() -> dict[str, ToolConfig]:
    return {"calculator": ToolConfig(profile="calc", function="call"), "python": ToolConfig(profile="python")}


class StagesConfig(Settings):
    """Episodes at once in each stage of one worker. What is over waits in front of the stage."""

    init_max: PositiveInt = 32
    """INIT: encode the prompt, open sandbox sessions. Bounds how many jails are started at once."""
    run_max: PositiveInt = 256
    """RUN: the agent. Should be at least the engines' slots, or they idle."""
    score_max: PositiveInt = 64
    """SCORE: rewards and hand-over. Bounds requests at the reward service."""
    init_s_max: PositiveFloat = 60.0
    """Longest time in INIT, seconds; beyond it the episode is an infra failure."""
    score_s_max: PositiveFloat = 120.0
    """Longest time in SCORE, seconds; beyond it the episode is an infra failure."""


class ToolLatencyConfig(Settings):
    """Extra latency of every tool call, for experiments on asynchrony."""

    distribution: Literal["none", "lognormal", "pareto"] = "none"
    """Shape. Both tails are long: most calls are quick, a few hold their whole group up."""
    mean_s: NonNegativeFloat = 1.0
    """Mean of the drawn latency, seconds."""
    shape: float = 1.5
    """Pareto: the tail index, above 1; lognormal: sigma of the logarithm. 1.5 puts about half of the time in a tenth of the
    calls."""
    max_s: PositiveFloat = 60.0
    """Longest latency, seconds; a draw above it is cut, which lowers the mean a little."""
    seed: int = 0
    """Seed of the draws."""

    def check_fields(self) -> None:
        if self.shape <= (1.0 if self.distribution == "pareto" else 0.0):
            raise ValueError(f"`shape` must be > 1 for pareto and > 0 for lognormal, got {self.shape}")


class WorkerConfig(Settings):
    """How a worker talks to the coordinator and the sample stream."""

    episodes_max: Annotated[int, Meta(ge=1, le=4096)] = 320
    """Episodes held at once, from lease to acknowledged report; at most 4096."""
    acquire_wait_s: Annotated[float, Meta(ge=0, le=60)] = 10.0
    """How long one request for work may wait at the coordinator, seconds, at most 60."""
    renew_every_s_max: PositiveFloat = 10.0
    """Leases are renewed after a third of their term, but at least this often, seconds."""
    report_window_s: Annotated[float, Meta(ge=0, le=1)] = 0.005
    """Reports that come within this time travel in one request, seconds. Longer saves requests and delays training."""
    rpc_s_max: PositiveFloat = 10.0
    """Deadline of a request to the coordinator (beyond the wait it asks for) and of an append, seconds."""
    backoff_s: PositiveFloat = 0.1
    """First wait after a failed request, seconds; doubles up to `backoff_s_max`."""
    backoff_s_max: PositiveFloat = 2.0
    """Longest wait between tries, seconds."""
    give_up_s: PositiveFloat = 120.0
    """How long a hand-over (append or report) is tried, seconds; then the coordinator's lease expiry decides. Longer than a
    restart of the bus or the coordinator takes."""
    finish_s_max: PositiveFloat = 120.0
    """After a command to drain: how long the episodes held may go on, seconds; those that are left are given back, for others to
    run from their beginning. Long enough for most of them: what is given back was work for nothing."""
    drain_s_max: PositiveFloat = 5.0
    """At the end: how long cancelled episodes get to close sessions and give their leases back, seconds."""

    def check_fields(self) -> None:
        if self.backoff_s_max < self.backoff_s:
            raise ValueError(f"`backoff_s_max` must be >= backoff_s = {self.backoff_s}, got {self.backoff_s_max}")


class RolloutConfig(Settings):
    """Settings of a rollout node."""

    agent: Extension = Extension("tool_calling")
    """Works on tasks: `tool_calling`, `single_turn`, or your own."""
    model_dir: str = ""
    """Folder with the model's tokenizer.json and tokenizer_config.json; the same that the engines serve."""
    tools: dict[str, ToolConfig] = msgspec.field(default_factory=_default_tools)
    """Tools by the name that tasks use."""
    session_ttl_s: Annotated[PositiveFloat, LIVE] = 900.0
    """Idle time after which a sandbox ends a session that this worker lost, seconds. Longer than the longest turn."""
    format: FormatConfig = msgspec.field(default_factory=FormatConfig)
    """Changes to the words of the conversation, which come from the model's chat template."""
    sampling: SamplingConfig = msgspec.field(default_factory=SamplingConfig)
    """How training episodes sample."""
    outputs: tuple[str, ...] = ()
    """Per-token outputs of the engine that are recorded beside log-probs, in `Segment.arrays`; each one that the loss needs must be
    here. The engine must be able to return them."""
    eval_sampling: SamplingConfig | None = None
    """How evaluation episodes sample; unset means as in training."""
    limits: LimitsConfig = msgspec.field(default_factory=LimitsConfig)
    """Limits of one episode."""
    stages: Annotated[StagesConfig, LIVE] = msgspec.field(default_factory=StagesConfig)
    """Episodes at once in each stage."""
    worker: Annotated[WorkerConfig, LIVE] = msgspec.field(default_factory=WorkerConfig)
    """Leases, reports and hand-over."""
    router: Annotated[RouterConfig, LIVE] = msgspec.field(default_factory=RouterConfig)
    """How generations find their node."""
    sandbox: Annotated[SandboxClientConfig, LIVE] = msgspec.field(default_factory=SandboxClientConfig)
    """How sessions find their node."""
    reward: Annotated[RewardClientConfig, LIVE] = msgspec.field(default_factory=RewardClientConfig)
    """How scoring requests are gathered."""
    tool_latency: Annotated[ToolLatencyConfig, LIVE] = msgspec.field(default_factory=ToolLatencyConfig)
    """Extra latency of tools, for experiments."""

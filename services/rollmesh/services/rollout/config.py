"""Settings of a rollout node: the agent, its sampling and its limits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rollmesh.shared.clients.inference_nodes import RouterConfig
from rollmesh.shared.clients.reward import RewardClientConfig
from rollmesh.shared.clients.sandbox import SandboxClientConfig
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.config.settings import (
    LIVE,
    NonEmptyStr,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Settings,
)
from rollmesh.shared.domain.extras import ExtraName
from rollmesh.shared.domain.outputs import NUM_TOP, NUM_TOP_MAX
from rollmesh.shared.rpc.addresses import host_of, is_wildcard, port_of

APPLICATION = "application"
"""Name of the agent that serves episodes to applications."""
ToolCallBody = Literal["bare", "json", "pythonic", "xml", "named_json", "arg_tags"]
AgentName = Annotated[str, Meta(pattern="^[A-Za-z0-9_.-]{1,64}$")]
_JSON_TYPES = ("string", "number", "integer", "boolean", "array", "object", "null")


class FormatConfig(Settings):
    """Overrides of conversation markers. Unset markers come from the model's chat template and its eos tokens."""

    turn_end: str | None = None
    """Ends an assistant turn; generation stops there. The chat template must write it after an assistant turn."""
    tool_call_start: str | None = None
    """Opens a tool call. Empty: the whole turn is the call."""
    tool_call_end: str | None = None
    """Closes a tool call; the end of the turn follows."""
    tool_call_body: ToolCallBody | None = None
    """Content of a call: `bare` is the text for the task's first tool, `json` is {"name": ..., "arguments": {...} or
    text}, `pythonic` is `[name(argument=value, ...), ...]`, `xml` is <function=NAME> with a tag <parameter=KEY> per
    argument, `named_json` is the name, then `tool_call_separator` and the arguments as a JSON object, `arg_tags` is the
    name, then <arg_key> and <arg_value> per argument."""
    tool_call_separator: str | None = None
    """Between the name and the arguments of a call of body `named_json`, such as `[ARGS]`. `{id}` in it stands for the
    id of the call."""
    observation: str | None = None
    """Text appended after a turn to show a tool's result, up to the start of the model's next turn. `{text}` itself is
    encoded without special tokens, so a tool's output cannot open a turn."""
    tool_role: str = "tool"
    """Role of an observation in the text view of the episode."""
    assistant_role: str = "assistant"
    """Role of the policy in the text view of the episode."""

    @property
    def names_calls(self) -> bool:
        """Whether a setting says how the model writes a call."""
        words = (self.tool_call_start, self.tool_call_end, self.tool_call_body, self.tool_call_separator)
        return any(word is not None for word in words)

    def check_fields(self) -> None:
        if self.observation is not None and self.observation.count("{text}") != 1:
            raise ValueError(f"`observation` must contain {{text}} exactly once, got {self.observation!r}")
        if self.turn_end == "":
            raise ValueError("`turn_end` must not be empty, got ''; remove the key to take it from the chat template")


class SamplingConfig(Settings):
    """Sampling parameters. An agent can override them per generation."""

    temperature: Annotated[float, Meta(ge=0, le=10)] = 1.0
    """0 is greedy. Off-policy corrections assume that training samples at 1 without truncation."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Nucleus mass. 1 disables the truncation."""
    top_k: NonNegativeInt = 0
    """Number of most probable tokens kept. 0 disables the truncation."""
    max_tokens: PositiveInt = 256
    """Maximum number of new tokens per turn."""


class LimitsConfig(Settings):
    """Limits of one episode. Reaching one counts as a model failure: the episode ends, is scored and may be trained
    on."""

    turns_max: PositiveInt = 16
    """Maximum number of generations."""
    tokens_max: PositiveInt = 4096
    """Maximum number of sampled tokens over all turns and branches."""
    context_tokens_max: PositiveInt = 1024
    """Maximum sequence length in tokens, with prompt and observations; at most the engine's `context_max`
    (`inference.engine.options.context_max`; both are 1024 by default, set both)."""
    run_s_max: PositiveFloat = 600.0
    """Maximum time in the RUN stage, seconds."""
    observation_chars_max: Annotated[int, Meta(ge=16)] = 4096
    """Maximum length of an observation, characters. The middle of a longer one is replaced by a mark."""
    score_calls_max: NonNegativeInt = 16
    """Maximum number of calls of `env.score`. An agent that can ask for its reward can search for it."""
    segments_max: PositiveInt = 1024
    """Maximum number of segments in the tree."""


class ToolConfig(Settings):
    """The place of execution of a tool, and its description in the prompt."""

    profile: str
    """Sandbox profile of the session it runs in. Tools of one profile share the episode's session."""
    function: str = ""
    """Function of the profile that receives the text. Empty: the text is code, which runs in the session."""
    stateless: bool | None = None
    """Whether calls run in live sessions that the episodes of a run share, which the profile must allow for the
    function. Absent: if the profile declares the function stateless."""
    language: str = "python"
    """Language of that code: python, bash, c, cpp, javascript, sqlite, duckdb. The sandbox's error lists the available
    ones."""
    arguments: tuple[str, ...] = ()
    """Arguments of every run. For sqlite and duckdb: the path of the database file in the session."""
    description: str = ""
    """Description in the prompt. Empty: the docstring of the profile's function."""
    parameters: dict[str, Any] = {}
    """JSON schema of the arguments in the prompt. Empty: derived from the signature of the profile's function."""

    def check_fields(self) -> None:
        if self.stateless and not self.function:
            raise ValueError(
                "`stateless` must be absent or false without `function`, because code needs a session of its episode"
            )
        if self.function and (self.language != "python" or self.arguments):
            raise ValueError(
                f"`function` must be empty for code in a language, got {self.function!r} with {self.language!r}"
            )
        _check_parameters(self.parameters)


def _check_parameters(schema: Mapping[str, Any]) -> None:
    """Raise ValueError unless a JSON schema describes the arguments of a call, as an object with named properties."""
    if schema and (why := _why_no_object(schema)):
        raise ValueError(
            f"`parameters` must be the JSON schema of an object, whose properties are the arguments: {why}"
        )


def _why_no_object(schema: Mapping[str, Any]) -> str:
    if schema.get("type") != "object":
        return f"its `type` must be object, got {schema.get('type')!r}"
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not all(isinstance(one, dict) for one in properties.values()):
        return f"its `properties` must map each argument to a JSON schema, got {properties!r}"
    for name, one in properties.items():
        kinds = one.get("type", [])
        if unknown := [kind for kind in ([kinds] if isinstance(kinds, str) else kinds) if kind not in _JSON_TYPES]:
            return f"the type of `{name}` must be one of {', '.join(_JSON_TYPES)}, got {unknown[0]!r}"
    if not isinstance(required, list) or not all(name in properties for name in required):
        return f"its `required` must list keys of `properties` ({', '.join(properties)}), got {required!r}"
    return ""


DEFAULT_TOOLS = {"calculator": ToolConfig(profile="calc", function="call"), "python": ToolConfig(profile="python")}


class StagesConfig(Settings):
    """Maximum number of concurrent episodes in each stage of one worker. Further episodes wait in a queue."""

    init_max: PositiveInt = 32
    """INIT: encode the prompt, open sandbox sessions. Bounds the number of jails that start concurrently."""
    run_max: PositiveInt = 256
    """RUN: the agent. SHOULD be at least the number of engine slots; otherwise engines are idle."""
    score_max: PositiveInt = 64
    """SCORE: rewards, append and report. Bounds concurrent requests to the reward service."""
    init_s_max: PositiveFloat = 60.0
    """Timeout of INIT, seconds. An episode that exceeds it is an infra failure."""
    score_s_max: PositiveFloat = 120.0
    """Timeout of SCORE, seconds. An episode that exceeds it is an infra failure."""


class ToolLatencyConfig(Settings):
    """Extra latency of every tool call, for experiments on asynchrony."""

    distribution: Literal["none", "lognormal", "pareto"] = "none"
    """Distribution. Both have long tails: most calls are fast, a few delay their whole group."""
    mean_s: NonNegativeFloat = 1.0
    """Mean of the drawn latency, seconds."""
    shape: float = 1.5
    """Pareto: the tail index, above 1. Lognormal: sigma of the logarithm. With 1.5, a tenth of the calls take about
    half of the time."""
    max_s: PositiveFloat = 60.0
    """Maximum latency, seconds. Clipping larger draws lowers the mean slightly."""
    seed: int = 0
    """Seed of the draws."""

    def check_fields(self) -> None:
        if self.shape <= (1.0 if self.distribution == "pareto" else 0.0):
            raise ValueError(f"`shape` must be > 1 for pareto and > 0 for lognormal, got {self.shape}")


class OpenAiServerConfig(Settings):
    """The server of the OpenAI protocol in each worker, for agents that are programs or services. It starts when an
    agent needs it."""

    address: NonEmptyStr = "127.0.0.1:0"
    """host:port on which it listens. Port 0 takes a free port, which several workers on one host need."""
    advertise: str = ""
    """Host by which services on other machines reach it. Empty: the host of `address`. The connection is not
    encrypted."""
    request_mb_max: Annotated[int, Meta(ge=1, le=1024)] = 16
    """Maximum size of the body of a request, MiB."""
    tool_calls: Extension | None = None
    """Parser of the model's tool calls: `hermes`, `llama3_json`, `llama_pythonic`, `qwen3_coder`, `bare` or a custom
    one. Absent: the parser for the calls that the model's chat template writes."""

    def check_fields(self) -> None:
        if not re.fullmatch(r"\S+:\d{1,5}", self.address) or port_of(self.address) > 65535:
            raise ValueError(f"`address` must be host:port, such as 127.0.0.1:0, got {self.address!r}")
        if is_wildcard(self.advertise or host_of(self.address)):
            raise ValueError(
                f"`advertise` must be a host that programs can call, because `address` is {self.address!r}"
            )


class WorkerConfig(Settings):
    """Limits and retries of a worker at the coordinator and the sample stream."""

    episodes_max: Annotated[int, Meta(ge=1, le=4096)] = 320
    """Maximum number of episodes held, from lease to acknowledged report; at most 4096."""
    acquire_wait_s: Annotated[float, Meta(ge=0, le=60)] = 10.0
    """Maximum wait of one request for work at the coordinator, seconds; at most 60."""
    renew_every_s_max: PositiveFloat = 10.0
    """Maximum interval between renewals of leases, seconds. They are renewed after a third of their term if that is
    shorter."""
    report_window_s: Annotated[float, Meta(ge=0, le=1)] = 0.005
    """Reports within this window share one request, seconds. A longer window saves requests and delays training."""
    rpc_s_max: PositiveFloat = 10.0
    """Deadline of an append and of a request to the coordinator (in addition to the requested wait), seconds."""
    backoff_s: PositiveFloat = 0.1
    """First back-off after a failed request, seconds; doubles up to `backoff_s_max`."""
    backoff_s_max: PositiveFloat = 2.0
    """Maximum back-off between retries, seconds."""
    give_up_s: PositiveFloat = 120.0
    """Retry limit of an append, a report or a request for private extras, seconds. Then the coordinator's lease
    expires. It should exceed the restart time of the bus and the coordinator."""
    finish_s_max: PositiveFloat = 120.0
    """Maximum time for held episodes to finish after a drain command, seconds. The remaining ones are released and
    restart on other workers. It should suffice for most episodes, because the work of a released episode is lost."""
    drain_s_max: PositiveFloat = 5.0
    """Maximum time for cancelled episodes to close their sessions and release their leases at shutdown, seconds."""

    def check_fields(self) -> None:
        if self.backoff_s_max < self.backoff_s:
            raise ValueError(f"`backoff_s_max` must be >= backoff_s = {self.backoff_s}, got {self.backoff_s_max}")


class RolloutConfig(Settings):
    """Settings of a rollout node."""

    agent: Extension = Extension("tool_calling")
    """The agent of tasks that name none: an entry of `agents`, `tool_calling`, `single_turn`, `program`, `url` or a
    custom one. A name of an entry means the entry."""
    agents: dict[AgentName, Extension] = {}
    """Agents by the name that tasks give in `agent`: 1 to 64 letters, digits, `_`, `.` and `-`. A task names one of
    these entries, or none."""
    private_extras: dict[str, tuple[ExtraName, ...]] = {}
    """Names of the private extras of tasks, such as solutions, that an agent may read, by the name of the agent: its
    entry of `agents`, or the name in `agent`. Agents `program` and `url` get none."""
    model_dir: str = ""
    """Folder with the tokenizer.json and tokenizer_config.json of the model that the engines serve."""
    tools: dict[str, ToolConfig] = msgspec.field(default_factory=lambda: dict(DEFAULT_TOOLS))
    """Tools by the name that tasks refer to."""
    session_ttl_s: Annotated[PositiveFloat, LIVE] = 900.0
    """Idle time after which a sandbox ends a session that this worker lost, seconds. It must exceed the longest
    turn."""
    format: FormatConfig = msgspec.field(default_factory=FormatConfig)
    """Overrides of conversation markers, which come from the model's chat template."""
    sampling: SamplingConfig = msgspec.field(default_factory=SamplingConfig)
    """Sampling of training episodes."""
    outputs: tuple[str, ...] = ()
    """Per-token outputs of the engine that are recorded in `Segment.arrays`, in addition to log-probs: `entropy`,
    `top_k`, `kept_mass`, `hidden`, `routed_experts`, as far as the engine supports them. List each output that the loss
    needs."""
    num_top: Annotated[int, msgspec.Meta(ge=1, le=NUM_TOP_MAX)] = NUM_TOP
    """Number of tokens in the output `top_k`."""
    greedy_first: bool = False
    """Whether the first episode of each training group is sampled at temperature 0 and is not trained: it is scored,
    and its reward may be a baseline. A temperature that the agent gives to `env.generate` overrides it."""
    summary_text_chars: Annotated[int, msgspec.Meta(ge=0, le=16_384)] = 0
    """Maximum length of the text of a sample that the other members of its group see in an estimator, characters. The
    ledger stores it, so set it only if the estimator compares texts. Times `run.batch_groups` and `run.group_size` it
    is at most 2 Mi. 0: no text."""
    pin: Literal["none", "response"] = "none"
    """Whether an update of the weights may change the version in the middle of a response of training. `none` lets it:
    the response then has one segment per version. `response` finishes each response under the version that began it. It
    needs an engine with `versions_max` >= 2, and one more to keep evaluations from delaying updates. An engine keeps
    the newest versions; a response whose version is dropped fails, and its episode is retried."""
    eval_sampling: SamplingConfig | None = None
    """Sampling of evaluation episodes. Unset: as in training."""
    limits: LimitsConfig = msgspec.field(default_factory=LimitsConfig)
    """Limits of one episode."""
    stages: Annotated[StagesConfig, LIVE] = msgspec.field(default_factory=StagesConfig)
    """Maximum number of concurrent episodes in each stage."""
    worker: Annotated[WorkerConfig, LIVE] = msgspec.field(default_factory=WorkerConfig)
    """Leases, appends and reports."""
    router: Annotated[RouterConfig, LIVE] = msgspec.field(default_factory=RouterConfig)
    """Routing of generations to inference nodes."""
    sandbox: Annotated[SandboxClientConfig, LIVE] = msgspec.field(default_factory=SandboxClientConfig)
    """Routing of sessions to sandbox nodes."""
    reward: Annotated[RewardClientConfig, LIVE] = msgspec.field(default_factory=RewardClientConfig)
    """Batching of scoring requests."""
    openai: OpenAiServerConfig = msgspec.field(default_factory=OpenAiServerConfig)
    """The server for agents that are programs or services."""
    tool_latency: Annotated[ToolLatencyConfig, LIVE] = msgspec.field(default_factory=ToolLatencyConfig)
    """Extra latency of tools, for experiments."""

    @property
    def agents_by_name(self) -> dict[str, Extension]:
        """The agents by the name that a task gives. The empty name means the default agent."""
        return {"": self.agents.get(self.agent.name, self.agent), **self.agents}

    def check_fields(self) -> None:
        if self.agent.name in self.agents and self.agent.options:
            raise ValueError(
                f"`agent` must not have options, because it names the entry {self.agent.name!r} of `agents`, got "
                f"{', '.join(self.agent.options)}; move them to the entry"
            )
        solving = [name or "the default" for name, one in self.agents_by_name.items() if one.name == "given_solution"]
        if self.greedy_first and solving:
            raise ValueError(
                f"`greedy_first` must be false with the agent given_solution ({solving[0]} agent), got true: the first "
                "episode of a group is not trained then, and that agent gives the solution in it"
            )

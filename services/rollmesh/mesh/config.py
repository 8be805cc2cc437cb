"""The configuration of a whole run: what `configs/*.yaml` hold.

Sections are the services' own configs. Folders that services write to are relative to the run folder; files that a user names
(tasks, agents, scorers, models) are relative to the config file.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from rollmesh.mesh.restarts import ProcessesConfig
from rollmesh.mesh.security import NetworkConfig, SecurityConfig, check_exposure
from rollmesh.services.coordinator.config import CoordinatorConfig
from rollmesh.services.coordinator.core.records import BoundPolicy, RunSpec
from rollmesh.services.data.config import DataConfig
from rollmesh.services.gateway.config import GatewayConfig
from rollmesh.services.inference.config import InferenceConfig
from rollmesh.services.learner.config import LearnerConfig
from rollmesh.services.reward.config import RewardConfig
from rollmesh.services.rollout.config import RolloutConfig
from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.services.weights.config import DepotConfig
from rollmesh.shared.bus.embedded_server import EmbeddedServerConfig
from rollmesh.shared.rpc.addresses import host_of, is_loopback
from rollmesh.shared.rpc.server import ServerConfig
from rollmesh.shared.telemetry import TelemetryConfig

_NOT_OF_SPEC = ("name", "beyond", "on_stall", "first_failures_max")
"""Of RunConfig: spelt otherwise in the coordinator's spec, or not its business."""


SERVING = ("coordinator", "gateway", "depot", "inference")
"""Sections with a `server` of their own."""


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the run is: batches, the staleness bound, leases, evaluation, the end."""

    name: str = "run"
    """Letters, digits, dash and underscore; names the streams and the run folder."""
    seed: int = 0
    """Key of all draws: tasks, sampling, minibatches."""
    policy: str = "main"
    """The trainable policy."""
    learner: str = "main"
    """The consumer of its samples."""
    max_staleness: int = 2
    """eta: most updates between the oldest trained token and its update. 0 is on-policy; larger hides longer tails and drifts
    more (docs/staleness.md)."""
    beyond: Literal["drop", "mask"] = "drop"
    """Samples beyond the bound end as stale, or only their too-old tokens lose their loss."""
    batch_groups: int = 16
    """Groups (tasks) per update."""
    group_size: int = 16
    """Episodes per group."""
    publish_every: int = 1
    """Updates between published weights, at most max_staleness + 1."""
    updates_max: int = 100
    """The run ends after this many updates; 0 means never."""
    seconds_max: float = 0.0
    """The run ends after this many seconds, counted while a coordinator leads it, over all of its lives; 0 means never."""
    success_target: float = 0.0
    """The run ends with the evaluation in which this share of all evaluation tasks succeeds; 0 means never."""
    tokens_max: int = 0
    """The run ends once this many tokens were sampled for its training samples, prompts and tool results not counted; 0 means never."""
    tries_max: int = 4
    """Tries of an episode that infrastructure fails."""
    episode_lease_s: float = 30.0
    """Silence after which a worker's episode is given to another, seconds."""
    batch_lease_s: float = 60.0
    """Silence after which a trainer's batch is in doubt, seconds."""
    group_s_max: float = 600.0
    """Longest life of a group, seconds; then it is decided on with what it has."""
    eval_every: int = 10
    """Updates between evaluations; the first and the last step are always evaluated. 0 means never."""
    eval_tasks: int = 320
    """Tasks per evaluation."""
    eval_split: str = "test"
    """Split they come from."""
    eval_s_max: float = 120.0
    """Longest time an evaluation may hold back new weights, seconds."""
    success_reward: str = "correct"
    """The reward that says right (1) or wrong (0)."""
    export_groups: int = 0
    """0: train. Above 0: nobody trains; this many tasks are rolled out group_size times each with the initial weights, StreamSamples
    hands the samples out, and the run ends. Nothing above about updates, staleness and evaluation matters then."""
    export_split: str = "test"
    """Split that an export takes its tasks from, in their order."""
    stall_s: float = 300.0
    """Seconds without progress (docs/reliability.md) after which the run counts as stalled and says who waits for whom. Longer than
    the longest update and episode, or busy work looks like a stall; 0 never."""
    on_stall: Literal["warn", "exit"] = "warn"
    """`exit` ends `rollmesh train` with a non-zero exit code and the cause; `warn` only shows it."""
    first_failures_max: int = 64
    """`rollmesh train` and `rollout` end with a non-zero exit code and the cause once this many samples have failed alike and none has been
    scored since they started: a bug in an agent or a scorer fails every sample. 0 never."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", self.name):
            raise ValueError(f"name must be 1-64 letters, digits, dashes or underscores, got {self.name!r}")
        if self.first_failures_max < 0:
            raise ValueError(f"first_failures_max must be >= 0, got {self.first_failures_max}")
        self.spec()  # ranges and combinations are checked where they mean something

    def spec(self) -> RunSpec:
        """The same as the coordinator knows it. ValueError for a value or combination that cannot work."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name not in _NOT_OF_SPEC}
        if self.export_groups:
            fields |= {"updates_max": 0, "eval_every": 0}
        return RunSpec(run=self.name, beyond=BoundPolicy[self.beyond.upper()], **fields)


class CountsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many nodes of each kind this host starts. With 0 they join from elsewhere: `rollmesh serve KIND --join HOST:PORT`."""

    inference: int = 1
    """Inference nodes."""
    rollout: int = 1
    """Rollout workers."""
    sandbox: int = 1
    """Sandbox nodes."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")


class BusConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the streams live."""

    url: str = ""
    """nats://host:port of a cluster (tls:// with the certificates of `security`); empty starts an embedded server in the run folder."""
    login_file: str = ""
    """File with one line USER:PASSWORD for that cluster, relative to the config file. Empty: the login of the embedded server,
    derived from the run's token."""
    embedded: EmbeddedServerConfig = msgspec.field(default_factory=EmbeddedServerConfig)
    """The embedded server."""

    def __post_init__(self) -> None:
        if "@" in self.url:
            raise ValueError("url must not hold a password; put USER:PASSWORD into a file and name it in login_file")
        for one in filter(None, self.url.split(",")):
            if not one.startswith("tls://") and not is_loopback(host_of(one.partition("://")[2])):
                raise ValueError(
                    f"url must be tls://... beyond this machine, got {one}: samples would cross the network in the clear"
                )


class MeshConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole run."""

    run: RunConfig = msgspec.field(default_factory=RunConfig)
    """What the run is."""
    model: str = ""
    """Folder of the initial model (transformers format, with tokenizer), relative to the config file."""
    counts: CountsConfig = msgspec.field(default_factory=CountsConfig)
    """How many nodes of each kind."""
    processes: ProcessesConfig = msgspec.field(default_factory=ProcessesConfig)
    """How the parts are run and kept alive."""
    security: SecurityConfig = msgspec.field(default_factory=SecurityConfig)
    """Certificates and token: who may talk to the services."""
    network: NetworkConfig = msgspec.field(default_factory=NetworkConfig)
    """Where the services listen."""
    bus: BusConfig = msgspec.field(default_factory=BusConfig)
    """Streams."""
    coordinator: CoordinatorConfig = msgspec.field(default_factory=CoordinatorConfig)
    """Admission, leases, ledger, fleet."""
    gateway: GatewayConfig = msgspec.field(default_factory=GatewayConfig)
    """The public face."""
    inference: InferenceConfig = msgspec.field(default_factory=lambda: InferenceConfig(directory="inference"))
    """Engines."""
    depot: DepotConfig = msgspec.field(default_factory=lambda: DepotConfig(directory="depot"))
    """Weights."""
    rollout: RolloutConfig = msgspec.field(default_factory=RolloutConfig)
    """Agents."""
    sandbox: SandboxConfig = msgspec.field(default_factory=SandboxConfig)
    """Execution of what the model wrote."""
    reward: RewardConfig = msgspec.field(default_factory=RewardConfig)
    """Scorers and finaliser."""
    data: DataConfig = msgspec.field(default_factory=DataConfig)
    """Tasks."""
    learner: LearnerConfig = msgspec.field(default_factory=LearnerConfig)
    """Training."""
    telemetry: TelemetryConfig = msgspec.field(default_factory=TelemetryConfig)
    """Traces, metrics, logs."""

    def __post_init__(self) -> None:
        check_exposure(self.security, self.servers())
        if self.learner.outputs:
            raise ValueError(
                f"learner.outputs must be empty, got {list(self.learner.outputs)}: it is set to `rollout.outputs`, name them there"
            )
        if self.learner.reward_weights:
            raise ValueError(
                f"learner.reward_weights must be empty, got {self.learner.reward_weights}: `reward.weights` serves the trainer "
                "and the finalizer alike, set it there"
            )

    def servers(self) -> dict[str, ServerConfig]:
        """Where services listen on this host, by key."""
        own = {name: getattr(self, name).server for name in SERVING}
        listening = {f"{name}.server": self.network.listening(server) for name, server in own.items()}
        return {"network.host": self.network.listening(ServerConfig()), **listening}

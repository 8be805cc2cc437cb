"""The configuration of a whole run, as in `configs/*.yaml`.

Sections are the services' own configs. Folders that services write to are relative to the run folder; files that a user
names (tasks, agents, scorers, models) are relative to the config file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rollmesh.mesh.restarts import ProcessesConfig
from rollmesh.mesh.security import NetworkConfig, SecurityConfig, check_exposure
from rollmesh.services.coordinator.config import CoordinatorConfig
from rollmesh.services.coordinator.core.records import BoundPolicy, ReplaySpec, RunSettings, RunSpec
from rollmesh.services.data.config import DataConfig
from rollmesh.services.gateway.config import GatewayConfig
from rollmesh.services.inference.config import InferenceConfig
from rollmesh.services.learner.config import LearnerConfig
from rollmesh.services.reward.config import RewardConfig
from rollmesh.services.rollout.config import RolloutConfig
from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.services.weights.config import DepotConfig
from rollmesh.shared.bus.embedded_server import EmbeddedServerConfig
from rollmesh.shared.bus.payload_bus import PayloadsIn
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.config.settings import LIVE, NonNegativeInt, Settings
from rollmesh.shared.endpoints.config import EndpointTable
from rollmesh.shared.rpc.addresses import host_of, is_loopback
from rollmesh.shared.rpc.limits import MESSAGE_BYTES_MAX
from rollmesh.shared.rpc.server import ServerConfig
from rollmesh.shared.telemetry import TelemetryConfig
from rollmesh.trainer.recipe import DEFAULT_RECIPE, find_recipe, read_recipe

SERVING = ("coordinator", "gateway", "depot", "inference")
"""Sections that have a `server`."""


class RunConfig(RunSettings):
    """What the run is: batches, the staleness bound, leases, evaluation, the end."""

    name: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,64}$")] = "run"
    """Name of the run. It names the streams and the run folder."""
    beyond: Literal["drop", "mask"] = "drop"
    """Whether samples beyond the bound end as stale (`drop`), or only their tokens that are too old lose their loss
    (`mask`)."""
    replay: ReplaySpec | None = None
    """The replay log. Absent: a trained sample is not trained again."""
    on_stall: Annotated[Literal["warn", "exit"], LIVE] = "warn"
    """What `rollmesh train` does when the run is stalled: `exit` ends it with a non-zero exit code and the cause,
    `warn` shows the cause."""
    loggers: Annotated[tuple[Extension, ...], LIVE] = ()
    """Experiment trackers that get the curves of `rollmesh train` beside TensorBoard: `wandb`, `mlflow`, or your own as
    `file.py:Name`."""
    first_failures_max: Annotated[NonNegativeInt, LIVE] = 64
    """`rollmesh train` and `rollout` exit with an error once this many samples have failed in the same way and none has
    been scored since they started, because a bug in an agent or a scorer fails every sample. 0: never."""

    def check_fields(self) -> None:
        self.spec()

    def spec(self) -> RunSpec:
        """Return the form that the coordinator records. ValueError for a combination that cannot work."""
        fields = {name: getattr(self, name) for name in RunSettings.__struct_fields__}
        if self.exports:
            fields |= {"updates_max": 0, "eval_every": 0}
        return RunSpec(run=self.name, beyond=BoundPolicy[self.beyond.upper()], replay=self.replay, **fields)


class CountsConfig(Settings):
    """Number of nodes of each kind that this host starts; `rollmesh scale` changes them while the mesh runs. With 0
    they join from elsewhere: `rollmesh serve KIND --join HOST:PORT`."""

    inference: NonNegativeInt = 1
    """Inference nodes."""
    rollout: NonNegativeInt = 1
    """Rollout workers."""
    sandbox: NonNegativeInt = 1
    """Sandbox nodes."""
    reward: NonNegativeInt = 1
    """Reward nodes."""


class BusConfig(Settings):
    """The NATS server that holds the streams."""

    url: str = ""
    """nats://host:port of each server of a cluster, comma-separated (tls:// with the certificates of `security`).
    Empty: start an embedded server in the run folder."""
    login_file: str = ""
    """File with lines USER:PASSWORD for that cluster, relative to the config file: one login for every service, or one
    per kind of service as `rollmesh nats-config` writes them. Empty: the login of the embedded server, derived from the
    run's token."""
    payloads: PayloadsIn = "auto"
    """Where workers store the payloads of samples. `files`: in `payloads` of the run folder, which needs the embedded
    server, one replica, and every service on loopback. `stream`: in the sample stream. `auto`: in files if these
    conditions hold. A kill of any process loses nothing in both; a power loss may lose the last seconds of both, except
    of a stream with `embedded.sync_always`."""
    embedded: EmbeddedServerConfig = msgspec.field(default_factory=EmbeddedServerConfig)
    """The embedded server."""

    def check_fields(self) -> None:
        if "@" in self.url:
            raise ValueError(
                "`url` must not contain a password; put USER:PASSWORD into a file and name it in login_file"
            )
        for one in filter(None, self.url.split(",")):
            if not one.startswith("tls://") and not is_loopback(host_of(one.partition("://")[2])):
                raise ValueError(
                    f"`url` must be tls://... for another machine, got {one}: samples would cross the network "
                    "unencrypted"
                )


BATCH_TEXT_CHARS_MAX = 2 * 1024 * 1024
"""Maximum length of the texts in the summaries of a batch. A message has at most 8 MiB, and a character up to four
bytes."""


BATCH_SAMPLES_MAX = MESSAGE_BYTES_MAX // 160
"""Most samples of a batch. A sample with one reward and one turn takes 160 bytes of the lease at least."""


class MeshConfig(Settings):
    """A whole run."""

    recipe: str = DEFAULT_RECIPE
    """The method: a name that `rollmesh recipes` lists, or your own file.yaml relative to the config file. The settings
    of the file override it, and it may set keys of any section that a method consists of
    (`rollmesh.trainer.recipe`)."""
    recipe_applied: bool = False
    """Whether the keys of the recipe are among the others already. The loader sets it, so that a resolved configuration
    no longer needs the recipe's file."""
    run: RunConfig = msgspec.field(default_factory=RunConfig)
    """What the run is."""
    model: str = ""
    """Folder of the initial model (transformers format, with tokenizer), relative to the config file."""
    counts: Annotated[CountsConfig, LIVE] = msgspec.field(default_factory=CountsConfig)
    """Number of nodes of each kind."""
    processes: Annotated[ProcessesConfig, LIVE] = msgspec.field(default_factory=ProcessesConfig)
    """How processes are started and restarted."""
    security: Annotated[SecurityConfig, LIVE] = msgspec.field(default_factory=SecurityConfig)
    """Certificates and token: which peers may call the services."""
    network: Annotated[NetworkConfig, LIVE] = msgspec.field(default_factory=NetworkConfig)
    """Where the services listen."""
    bus: Annotated[BusConfig, LIVE] = msgspec.field(default_factory=BusConfig)
    """Streams."""
    coordinator: Annotated[CoordinatorConfig, LIVE] = msgspec.field(default_factory=CoordinatorConfig)
    """Admission, leases, ledger, fleet."""
    gateway: Annotated[GatewayConfig, LIVE] = msgspec.field(default_factory=GatewayConfig)
    """The public front end."""
    inference: Annotated[InferenceConfig, LIVE] = msgspec.field(
        default_factory=lambda: InferenceConfig(directory="inference")
    )
    """Engines."""
    endpoints: EndpointTable = {}
    """Models without a learner by name, which agents, scorers and task sources may ask: judges, opponents, past steps
    of the policy."""
    depot: Annotated[DepotConfig, LIVE] = msgspec.field(default_factory=lambda: DepotConfig(directory="depot"))
    """Weights."""
    rollout: RolloutConfig = msgspec.field(default_factory=RolloutConfig)
    """Agents."""
    sandbox: Annotated[SandboxConfig, LIVE] = msgspec.field(default_factory=SandboxConfig)
    """Execution of model-written code."""
    reward: RewardConfig = msgspec.field(default_factory=RewardConfig)
    """Scorers and finalizers."""
    data: DataConfig = msgspec.field(default_factory=DataConfig)
    """Tasks."""
    learner: LearnerConfig = msgspec.field(default_factory=LearnerConfig)
    """Training."""
    telemetry: Annotated[TelemetryConfig, LIVE] = msgspec.field(default_factory=TelemetryConfig)
    """Traces, metrics, logs."""

    def check_fields(self) -> None:
        if self.recipe != DEFAULT_RECIPE and not self.recipe_applied:
            raise ValueError(
                f"`recipe` {self.recipe} is not applied; read the configuration with load_config or config_from_dict"
            )
        page = self.gateway.page
        pages = {"gateway.page": ServerConfig(address=page.address)} if page.serve != "never" else {}
        check_exposure(self.security, {**self.servers(), **pages})
        if page.client_certificates and not self.security.has_tls:
            raise ValueError(
                "`gateway.page.client_certificates` needs `security` with ca, certificate and key; set it to false, or "
                "name them"
            )
        if self.gateway.forwarded_max >= (most := self.coordinator.server.connection_rpcs_max):
            raise ValueError(
                f"`gateway.forwarded_max` must be < coordinator.server.connection_rpcs_max, which is {most}, got "
                f"{self.gateway.forwarded_max}"
            )
        if self.learner.outputs:
            raise ValueError(
                f"`learner.outputs` must be empty, got {list(self.learner.outputs)}: name the outputs in "
                "`rollout.outputs`"
            )
        if reserved := {"policy", self.inference.policy} & set(self.endpoints):
            raise ValueError(
                f"`endpoints` must not contain {reserved.pop()!r}, the name of the trained policy; rename the endpoint"
            )
        if self.bus.payloads == "files" and (why := self.why_no_payload_files()):
            raise ValueError(f"`bus.payloads` must be auto or stream, got 'files': {why}")
        if (share := self.coordinator.run.retain_share) and not self.payloads_in_files:
            why = self.why_no_payload_files() or "`bus.payloads` is stream"
            raise ValueError(
                f"`coordinator.run.retain_share` must be 0 with payloads in the sample stream, got {share}: {why}; run "
                "`rollmesh export` while the run continues"
            )
        if self.rollout.greedy_first and self.run.group_size == 1:
            raise ValueError(
                "`run.group_size` must be >= 2 with `rollout.greedy_first`, got 1: the greedy episode is not trained, "
                "so no sample would be"
            )
        texts = self.rollout.summary_text_chars * self.run.batch_groups * self.run.group_size
        if texts > BATCH_TEXT_CHARS_MAX:
            raise ValueError(
                f"`rollout.summary_text_chars` * run.batch_groups * run.group_size must be <= {BATCH_TEXT_CHARS_MAX}, "
                f"because the texts of a batch are in one message, got {texts}; lower summary_text_chars"
            )
        samples = self.run.batch_groups * self.run.group_size
        if not self.run.exports and samples > BATCH_SAMPLES_MAX:
            raise ValueError(
                f"`run.batch_groups` * run.group_size must be <= {BATCH_SAMPLES_MAX}, because the metadata of a batch "
                f"are in one message of at most {MESSAGE_BYTES_MAX} bytes, got {samples}; lower one of them"
            )
        if self.learner.reward_weights:
            raise ValueError(
                f"`learner.reward_weights` must be empty, got {self.learner.reward_weights}: set `reward.weights`, "
                "which the trainer and the finalizers share"
            )

    @staticmethod
    def underlay(tree: dict[str, Any], base_dir: Path | None) -> Path | None:
        """Return the file of the recipe that `tree` names, and note in `tree` that it is applied. Raises
        ConfigError."""
        name = tree.get("recipe", DEFAULT_RECIPE)
        if tree.get("recipe_applied") or not isinstance(name, str):
            return None
        tree["recipe_applied"] = True
        file = find_recipe(name, base_dir)
        read_recipe(file)  # its sections and its `about` are checked here, its settings with those of the run
        return file

    @property
    def payloads_in_files(self) -> bool:
        """Whether workers of this host store payloads in files."""
        return self.bus.payloads != "stream" and not self.why_no_payload_files()

    @property
    def archives_ledgers(self) -> bool:
        """Whether old records of ledgers move to archive segments on this host."""
        store = self.coordinator.archive.store
        return store == "files" or (store == "auto" and not self.why_several_hosts())

    def why_no_payload_files(self) -> str:
        """Return why payloads must be in the stream; empty if files of this host are as safe."""
        if self.bus.embedded.sync_always:
            return "`bus.embedded.sync_always` promises records that survive a power loss"
        if self.coordinator.streams.num_replicas > 1:
            return "`coordinator.streams.num_replicas` promises copies on several hosts"
        return self.why_several_hosts()

    def why_several_hosts(self) -> str:
        """Return why processes that read streams may be on other hosts; empty if all are on this one."""
        if self.bus.url:
            return "`bus.url` names a server that may be on another host"
        for key, server in self.servers().items():
            if not is_loopback(host_of(server.address)):
                return f"`{key}` is {server.address}, so that nodes on other hosts can join"
        return ""

    def servers(self) -> dict[str, ServerConfig]:
        """Return where services listen on this host, by key."""
        own = {name: getattr(self, name).server for name in SERVING}
        listening = {f"{name}.server": self.network.listening(server) for name, server in own.items()}
        return {"network.host": self.network.listening(ServerConfig()), **listening}

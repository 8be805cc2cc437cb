"""Settings of the reward service, and construction of its engine."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, get_args

from msgspec import Meta

from rollmesh.services.reward.engine import RewardEngine
from rollmesh.services.reward.finalizer import FINALIZERS
from rollmesh.services.reward.finalizer_list import ConfiguredFinalizer
from rollmesh.services.reward.graph import nearest
from rollmesh.services.reward.oracles import ORACLES, AnswerFileConfig, Oracles, file_oracles
from rollmesh.services.reward.scorer import SCORERS, BatchScorer, Policy, Sandbox, Scorer, Sees
from rollmesh.services.reward.scorer_run import ConfiguredScorer
from rollmesh.services.reward.submitted_oracle import FindsKeys, SubmittedOracle
from rollmesh.shared.clients.inference_nodes import RouterConfig
from rollmesh.shared.clients.sandbox import SandboxClientConfig
from rollmesh.shared.config.plugin import overrides
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.config.settings import LIVE, NonNegativeFloat, PositiveFloat, PositiveInt, Settings
from rollmesh.shared.config.user_code import takes_arguments
from rollmesh.shared.endpoints.answer import Asks
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.estimators import make_estimator


class ScorerConfig(Extension):
    """One scorer: a built-in one such as `exact`, or your own, with the name of its reward."""

    reward: str = ""
    """Name of its reward within the run. Default: the short name of the scorer."""
    timeout_s: PositiveFloat = 30.0
    """Timeout for one sample, in seconds. A timeout is an infra failure of the sample. For `tests` it limits the time
    that the candidate takes in all hidden tests, without waits: the remaining tests count as TLE, which is a verdict
    and not an infra failure."""

    batch_max: PositiveInt = 32
    """Maximum number of samples in one call of a scorer with `score_batch`."""
    batch_wait_s: NonNegativeFloat = 0.01
    """Maximum wait of a sample for others of its call, in seconds, for a scorer with `score_batch`."""

    @property
    def reward_name(self) -> str:
        return self.reward or self.short_name


class RewardConfig(Settings):
    """Settings of the reward service."""

    scorers: Annotated[tuple[ScorerConfig, ...], Meta(min_length=1)] = (ScorerConfig(name="exact", reward="correct"),)
    """Scorers, whose rewards have different names. Those that do not read each other's rewards run at the same
    time."""
    weights: dict[str, float] = {}
    """Weight by reward name, for the estimator of the built-in trainer and for the finalizers. A reward without a
    weight is recorded, but not optimized. If empty, every reward has weight 1."""
    finalizers: Annotated[tuple[Extension, ...], Meta(min_length=1)] = (Extension("zero_variance"),)
    """Decide on a group when its members have ended: `zero_variance`, `keep_all`, `band`, or your own. They run in this
    order. The first that filters or extends the group decides; members that it drops are not shown to the next."""
    listed = {"finalizer": "finalizers"}
    answer_files: dict[str, AnswerFileConfig] = {}
    """Files with the answer keys of `jsonl` and `files` sources, by the `name` of the source."""
    oracles: dict[str, Extension] = {}
    """Oracles by the scheme of the references that they resolve, besides the built-in ones."""
    sandboxes: Annotated[tuple[str, ...], LIVE] = ()
    """Addresses (host:port) of sandbox nodes for scorers that run code, in addition to those of the mesh."""
    sandbox: Annotated[SandboxClientConfig, LIVE] = SandboxClientConfig()
    """Limits of the client of sandbox nodes."""
    router: Annotated[RouterConfig, LIVE] = RouterConfig()
    """Routing of scoring calls to inference nodes, for scorers with `use_policy`. `score_calls_max` bounds the
    concurrent ones."""
    concurrency_max: Annotated[PositiveInt, LIVE] = 64
    """Maximum number of calls of scorers at the same time."""
    queue_samples_max: Annotated[PositiveInt, LIVE] = 4096
    """Maximum number of samples that wait or are scored. More are rejected with OVERLOADED."""

    def check_fields(self) -> None:
        if self.weights and not any(self.weights.values()):
            raise ValueError(f"`weights` must contain a weight other than 0, got {self.weights}")


def build_engine(
    config: RewardConfig,
    base_dir: str | Path | None = None,
    sandbox: Sandbox | None = None,
    estimator: Extension | str = "grpo",
    policy: Policy | None = None,
    endpoints: Asks | None = None,
    answer_keys: FindsKeys | None = None,
) -> RewardEngine:
    """Return the engine of the service. Relative files are relative to `base_dir`.

    Without a `sandbox`, `policy` or `endpoints`, the scorers that use it fail; their samples are infra failures.
    `answer_keys` has those of submitted tasks.
    `estimator` is that of the trainer. Its weights are those of `config`. Raise ConfigError, or RecordError for a
    malformed answer file.
    """
    scorers = [build_scorer(scorer, base_dir) for scorer in config.scorers]
    _check_weights(config.weights, scorers)
    for configured in scorers:
        if sandbox is not None:
            configured.scorer.use_sandbox(sandbox)
        if policy is not None:
            configured.scorer.use_policy(policy)
        if endpoints is not None:
            configured.scorer.use_endpoints(endpoints)
    return RewardEngine(
        scorers=scorers,
        finalizers=[
            ConfiguredFinalizer(name=shown_name(chosen.name), finalizer=FINALIZERS.make(chosen, base_dir))
            for chosen in config.finalizers
        ],
        estimator=make_estimator(estimator, config.weights, base_dir),
        estimator_name=shown_name(estimator if isinstance(estimator, str) else estimator.name),
        oracles=Oracles(
            {
                **file_oracles(config.answer_files, base_dir),
                "submitted": SubmittedOracle(answer_keys),
                **{scheme: ORACLES.make(oracle, base_dir) for scheme, oracle in config.oracles.items()},
            }
        ),
        concurrency_max=config.concurrency_max,
        queue_samples_max=config.queue_samples_max,
    )


def shown_name(name: str) -> str:
    """Return the name of an extension with its file, but without the folder of the file."""
    return name.rpartition("/")[2]


def build_scorer(config: ScorerConfig, base_dir: str | Path | None) -> ConfiguredScorer:
    """Construct one scorer. Raise ConfigError."""
    scorer: Scorer = SCORERS.make(config, base_dir)
    for attribute, example in (
        ("columns", "entropy"),
        ("reads", "correct"),
        ("rewards", "brief"),
        ("diagnostics", "brief"),
    ):
        names = getattr(scorer, attribute)
        if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
            raise ConfigError(
                f'scorer `{config.name}`: `{attribute}` must be a tuple of names such as ("{example}",), got {names!r}',
                name=config.name,
            )
    if isinstance(scorer, BatchScorer) and scorer.sees not in get_args(Sees):
        raise ConfigError(
            f"scorer `{config.name}`: `sees` must be one of {', '.join(get_args(Sees))}, got {scorer.sees!r}",
            name=config.name,
        )
    if not inspect.iscoroutinefunction(scorer.score) or not takes_arguments(scorer.score, 1):
        raise ConfigError(f"scorer `{config.name}` must have a method `async def score(self, item)`", name=config.name)
    scorer.use_timeout(config.timeout_s)
    scorer.use_reward_name(config.reward_name)
    return ConfiguredScorer(
        name=config.reward_name,
        label=f"{config.short_name}@{scorer.version}",
        scorer=scorer,
        timeout_s=None if overrides(scorer, Scorer.use_timeout) else config.timeout_s,
        batch_max=config.batch_max,
        batch_wait_s=config.batch_wait_s,
    )


def _check_weights(weights: Mapping[str, float], scorers: Sequence[ConfiguredScorer]) -> None:
    """Reject a weight for a reward that no scorer has, because the intended reward would be missing in every total, and
    no weights with a reward that is a diagnostic, because it would count in every total."""
    diagnostics = [name for scorer in scorers for name in scorer.scorer.diagnostics]
    if diagnostics and not weights:
        judging = [scorer.name for scorer in scorers]
        raise ConfigError(
            f"`reward.weights` must name the rewards to optimize, for example {{{judging[0]}: 1.0}}, because without "
            f"weights {', '.join(diagnostics)} would count too, which only describe a sample",
            key="reward.weights",
        )
    known = [name for scorer in scorers for name in scorer.reward_names]
    for name in weights:
        if name not in known:
            meant = nearest(name, known)
            raise ConfigError(
                f"`reward.weights` must name rewards of scorers ({', '.join(known)}), got {name!r}"
                + (meant or "; a custom scorer lists its other names in `rewards`"),
                key="reward.weights",
            )

"""Find every mistake of a configuration before a run starts. Each one names the key, the expected value and the remedy.

The types of the sections check their values when a file is read. This module checks files, the user's objects, and
settings of two sections that must agree. `model_checks` checks the model, and `profile_checks` starts each sandbox
profile once. Nothing else is started or written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollmesh.app.checks.model_checks import check_made_model, check_model, check_reference, model_folder
from rollmesh.app.checks.profile_checks import check_profiles
from rollmesh.app.checks.task_survey import TaskSurvey, survey_tasks
from rollmesh.app.checks.variant_checks import variant_mistakes
from rollmesh.app.config import TrainConfig, read_train_config
from rollmesh.app.loggers.run_loggers import LOGGERS, check_installed
from rollmesh.mesh.config import MeshConfig
from rollmesh.mesh.mesh_services import blocking_endpoints, reward_config
from rollmesh.mesh.security import open_tls, read_token
from rollmesh.services.coordinator.core.rollouts import REWARDS_BYTES_MAX, reward_bytes
from rollmesh.services.data.config import build_pools, build_selector
from rollmesh.services.data.source import SUBMITTED
from rollmesh.services.data.task import PoolTask, Split, TaskPool
from rollmesh.services.inference.config import InferenceConfig
from rollmesh.services.inference.engine import INFERENCE_ENGINES, takes_option, with_model
from rollmesh.services.inference.interpreter import check_interpreter, interpreter_of, is_this
from rollmesh.services.learner.engine import TRAINERS, find_engine
from rollmesh.services.reward.config import ScorerConfig, build_scorer
from rollmesh.services.reward.config import build_engine as build_reward_engine
from rollmesh.services.reward.finalizer import FINALIZERS
from rollmesh.services.reward.graph import ScorerGraph
from rollmesh.services.reward.item import check_task_scorers
from rollmesh.services.reward.oracles import ORACLES, Oracles, names_record
from rollmesh.services.reward.scorer_run import ConfiguredScorer
from rollmesh.services.rollout.agent import known_agents, load_agent, permitted_extras
from rollmesh.services.rollout.config import DEFAULT_TOOLS, ToolConfig
from rollmesh.services.rollout.private_extras import missing_extra_error
from rollmesh.services.sandbox.egress.retrieval.backend import BACKENDS
from rollmesh.services.sandbox.engine import ENGINES
from rollmesh.services.sandbox.languages import declared_commands
from rollmesh.shared.bus.embedded_server import find_binary
from rollmesh.shared.config import plugin
from rollmesh.shared.config.loader import all_in_one, underlay_places
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.outputs import array_names, output_of
from rollmesh.shared.endpoints.config import check_endpoint
from rollmesh.shared.errors import ConfigError, InvalidInput, MeshError, UnknownOracle, at_key, located_at
from rollmesh.trainer.estimators import Estimator, make_estimator
from rollmesh.trainer.part import UpdatePart

if TYPE_CHECKING:  # it imports torch
    from rollmesh.trainer.plugins import Plugins


def load_checked(path: Path, overrides: Sequence[str] = (), *, learner: bool = True) -> tuple[TrainConfig, TaskSurvey]:
    """Return the checked configuration of a file, and what was found in its tasks. Raises InvalidInput with every
    mistake in the file and in what it names.

    `learner`: whether a learner will run on this host, with the libraries that it needs.
    """
    config, mistakes = read_train_config(path, overrides)
    if config is None:
        raise all_in_one(mistakes)
    check = _Check(config, path.parent, learner=learner)
    if found := [*mistakes, *_placed(check.mistakes_beside(mistakes), path, overrides)]:
        raise all_in_one(found)
    return config, check.tasks


def _placed(mistakes: Sequence[MeshError], path: Path, overrides: Sequence[str]) -> list[MeshError]:
    """Return the mistakes with file and line of those values that the recipe gives, because the user's file does not
    show them."""
    if not mistakes:
        return []
    place = underlay_places(TrainConfig, path, overrides)
    return [
        ConfigError(f"{where}: {mistake.message}", violations=mistake.violations, key=mistake.metadata["key"])
        if (where := place(mistake.metadata.get("key", "")))
        else mistake
        for mistake in mistakes
    ]


def check(config: TrainConfig, base_dir: Path, *, learner: bool = True) -> TaskSurvey:
    """Load the model if one is named, and return what was found in the tasks. Raises InvalidInput with every
    mistake."""
    check = _Check(config, base_dir, learner=learner)
    if found := check.mistakes_beside(()):
        raise all_in_one(found)
    return check.tasks


def find_mistakes(config: TrainConfig, base_dir: Path, *, learner: bool = True) -> list[MeshError]:
    """Return every mistake."""
    return _Check(config, base_dir, learner=learner).mistakes_beside(())


class _Check:
    """The checks of one configuration."""

    def __init__(self, config: TrainConfig, base_dir: Path, *, learner: bool) -> None:
        self._config = config
        self._base_dir = base_dir
        self._learner = learner
        self._reward_names: list[str] | None = None
        self.mistakes: list[MeshError] = []
        self.tasks = TaskSurvey()

    @contextmanager
    def _collected(self, key: str = "") -> Iterator[None]:
        """Keep a mistake. If it names no key, add `key`."""
        try:
            yield
        except InvalidInput as err:
            if key and "key" not in err.metadata:
                err = at_key(err, key)
            if str(err) not in map(str, self.mistakes):  # several checks construct the same part
                self.mistakes.append(err)

    def mistakes_beside(self, known: Sequence[MeshError]) -> list[MeshError]:
        """Return every mistake, except at the keys of `known`: there the configuration holds a default instead of the
        given value."""
        self._all()
        keys = [key for mistake in known if (key := mistake.metadata.get("key"))]
        return [
            mistake
            for mistake in self.mistakes
            if not any(f"{mistake.metadata.get('key', '')}.".startswith(f"{key}.") for key in keys)
        ]

    def _all(self) -> None:
        config, base_dir = self._config, self._base_dir
        for name, endpoint in config.endpoints.items():
            with self._collected(f"endpoints.{name}"), located_at(f"endpoints.{name}"):
                check_endpoint(endpoint, base_dir)
        pools: dict[Split, TaskPool] = {}
        with self._collected("data.source"):
            pools = build_pools(config.data, base_dir, blocking_endpoints(config, base_dir))
        if pools:
            with self._collected("data.selector"):
                build_selector(config.data, pools[Split.TRAIN], base_dir)
        tasks = self.tasks = survey_tasks(pools)
        if pools:
            self._tools(tasks.tools)
            self._named(tasks)
        drawn = not (config.run.submitted_tasks or config.run.export_groups)  # an export draws from a split
        if config.data.source.name == SUBMITTED and drawn:
            what = "`run.submitted_tasks` must be true with `data.source` submitted, which has no tasks, got false"
            self.mistakes.append(ConfigError(what, key="run.submitted_tasks"))
        with self._collected():
            self._evaluation(pools)
        self._rewards(tasks if pools else None)
        with self._collected("learner.estimator"):
            self._memory(make_estimator(config.learner.estimator, config.reward.weights, base_dir))
        with self._collected("security"):
            open_tls(config.security, base_dir=base_dir)
            if config.security.token_file:
                read_token(base_dir / config.security.token_file)
        with self._collected("bus.url"):
            if not config.bus.url:
                find_binary()
        self._agents(tasks)
        self.mistakes += variant_mistakes(config, base_dir, tasks)
        with self._collected("sandbox.engine"):
            ENGINES.options(config.sandbox.engine, base_dir)
        with self._collected("sandbox.languages"):
            declared_commands(config.sandbox.located(base_dir).languages)
        for name, policy in config.sandbox.egress.items():
            if policy.retrieval is not None:
                with self._collected(f"sandbox.egress.{name}.retrieval.backend"):
                    BACKENDS.options(policy.retrieval.backend, base_dir)
        if self._learner or config.counts.inference:
            self._learning(tasks)

    def _tools(self, listed: frozenset[str]) -> None:
        """Check the tools that tasks list, and the profiles in which this host runs them."""
        config = self._config
        for name in sorted(listed):
            with self._collected():
                _check_tool(config, name)
        for name, tool in config.rollout.tools.items():
            if name not in listed and not _is_default(name, tool) and not config.run.submitted_tasks:
                self.mistakes.append(
                    ConfigError(
                        f"`rollout.tools.{name}`: no task lists this tool, so no episode has it; add it to "
                        "`data.source.options.tools`, or remove it",
                        key=f"rollout.tools.{name}",
                    )
                )
        if config.counts.sandbox:
            own = {name: tool for name, tool in config.rollout.tools.items() if not _is_default(name, tool)}
            with self._collected("sandbox.engine"):
                self.mistakes += check_profiles(config.sandbox.located(self._base_dir), own)

    def _named(self, tasks: TaskSurvey) -> None:
        """Check that the agents and scorers which tasks name exist."""
        agents = self._config.rollout.agents_by_name
        for name, task in tasks.by_agent.items():
            if name not in agents:
                self.mistakes.append(
                    ConfigError(
                        f"`data.source`: task {task.task_id} names the agent `{name}`, which does not exist; "
                        f"{known_agents(agents)}",
                        key="data.source",
                    )
                )
        rewards = [scorer.reward_name for scorer in self._config.reward.scorers]
        for scorers, task in {scorers: task for (_, scorers), task in tasks.scored_by.items()}.items():
            try:
                check_task_scorers(scorers, rewards)
            except InvalidInput as err:
                what = f"`data.source`: task {task.task_id}: {err.message}"
                self.mistakes.append(ConfigError(what, key="data.source"))

    def _agents(self, tasks: TaskSurvey) -> None:
        """Check the agents, and that their tasks have the private extras that they read."""
        rollout = self._config.rollout
        chosen = {f"rollout.agents.{name}": (name, agent) for name, agent in rollout.agents.items()}
        if rollout.agent.name not in rollout.agents:
            chosen["rollout.agent"] = (rollout.agent.name, rollout.agent)
        for key, (name, extension) in chosen.items():
            with self._collected(key):
                agent = load_agent(extension, self._base_dir)
                names = permitted_extras(name, agent, rollout)
                named = {name, ""} if name == rollout.agent.name else {name}
                for task in tasks.with_private_extras:
                    if task.agent in named:
                        self._private_extras(task, names)

    def _private_extras(self, task: PoolTask, names: Sequence[str]) -> None:
        if missing := [name for name in names if name not in task.private_extras]:
            what = f"`data.source`: {missing_extra_error(task.task_id, task.labels, missing[0])}"
            raise ConfigError(what, key="data.source.options.private_extras")

    def _learning(self, tasks: TaskSurvey) -> None:
        """Check what needs torch: engine, learner and model."""
        config, base_dir = self._config, self._base_dir
        engine = None
        with self._collected("inference.engine"):
            engine = self._engine()
        if config.counts.inference:
            with self._collected("inference.python"):
                python = interpreter_of(config.inference, base_dir)
                if not is_this(python):
                    check_interpreter(python, config.inference)
        self._method()
        if config.made_model is not None:
            with self._collected():
                check_made_model(config, base_dir, engine)
        else:
            self.mistakes += check_model(config, base_dir, engine, tasks)

    def _method(self) -> None:
        """Check the trainer, and what the parts of an update need of the run."""
        config, learner, trains_model = self._config, self._config.learner, False
        with self._collected("learner.engine"):
            find_engine(learner.engine, self._base_dir)
            trains_model = TRAINERS.find(learner.engine.name, self._base_dir).trains_model
        plugins = self._plugins() if trains_model else None
        if plugins is None:
            return
        with self._needed("rollout.outputs"):
            plugins.check_outputs(array_names(config.rollout.outputs))
        if plugins.under("reference") and learner.reference.kind == "path":
            with self._collected():
                check_reference(config, self._base_dir)
        if not config.run.export_groups:  # an export has no updates
            with self._needed("run.group_size"):
                plugins.check_group_size(config.run.group_size)
        if self._reward_names is not None:
            with self._needed("reward.scorers"):
                plugins.check_rewards(self._reward_names)

    def _plugins(self) -> Plugins | None:
        """Return the parts of an update; None after a mistake in one of them."""
        from rollmesh.trainer.features import FEATURES
        from rollmesh.trainer.losses import LOSSES
        from rollmesh.trainer.update_rules import UPDATE_RULES

        learner, before = self._config.learner, len(self.mistakes)
        for index, term in enumerate(learner.loss):
            with self._collected(f"learner.loss[{index}]"):
                LOSSES.options(term, self._base_dir)
        with self._collected("learner.update_rule"):
            UPDATE_RULES.options(learner.update_rule, self._base_dir)
        for name, choice in learner.features.items():
            with self._collected(f"learner.features.{name}"):
                FEATURES.options(choice, self._base_dir)
        if len(self.mistakes) > before:
            return None  # the constructors would report the same mistakes, one at a time
        with self._collected("learner"):
            return make_plugins(self._config, self._base_dir)
        return None

    @contextmanager
    def _needed(self, key: str) -> Iterator[None]:
        """Keep the ValueError of a part that needs another value of `key`, which the message names."""
        try:
            yield
        except ValueError as err:
            self.mistakes.append(ConfigError(str(err), key=key))

    def _memory(self, estimator: Estimator) -> None:
        """Reject an estimator with memory in a run that trains samples again, which would enter it twice."""
        name = self._config.learner.estimator.name
        if self._config.run.replay is not None and plugin.overrides(estimator, UpdatePart.state):
            raise ConfigError(
                f"`learner.estimator` must have no memory with `run.replay`, got {name}, because a replayed sample "
                "would enter its memory twice; use another estimator, such as grpo, or remove `run.replay`"
            )

    def _evaluation(self, pools: dict[Split, TaskPool]) -> None:
        run = self._config.run
        if run.eval_split not in set(Split):
            raise ConfigError(
                f"`run.eval_split` must be one of {', '.join(Split)}; got {run.eval_split!r}", key="run.eval_split"
            )
        if pools and run.eval_every and run.eval_tasks and not len(pools[Split(run.eval_split)]):
            raise ConfigError(
                f"`run.eval_split`: the source has no task in the {run.eval_split} split; give it some, name another "
                "split, or set run.eval_every=0",
                key="run.eval_split",
            )

    def _rewards(self, tasks: TaskSurvey | None) -> None:
        config, before = self._config, len(self.mistakes)
        names: list[str] = []
        scorers: list[ConfiguredScorer] = []
        num_bytes = 0
        known = ("logprobs", *array_names(config.rollout.outputs))
        for index, scorer in enumerate(config.reward.scorers):
            with self._collected():
                configured = load_scorer(scorer, index, self._base_dir)
                scorers.append(configured)
                names += configured.reward_names
                label = configured.label.ljust(configured.label_chars_max)
                num_bytes += sum(reward_bytes(name, label) for name in configured.reward_names)
                if missing := [name for name in configured.columns if name not in known]:
                    self.mistakes.append(_missing_column(index, missing, known))
        if len(scorers) == len(config.reward.scorers):
            with self._collected("reward.scorers"):
                ScorerGraph(scorers)
        for logger in config.run.loggers:
            with self._collected("run.loggers"):
                LOGGERS.options(logger, self._base_dir)
                check_installed(logger.name)
        for index, finalizer in enumerate(config.reward.finalizers):
            with self._collected(f"reward.finalizers[{index}]"):
                FINALIZERS.options(finalizer, self._base_dir)
        for scheme, oracle in config.reward.oracles.items():
            with self._collected(f"reward.oracles.{scheme}"):
                ORACLES.options(oracle, self._base_dir)
        if len(self.mistakes) > before:
            return  # the checks below need these parts
        self._reward_names = names
        # The answers are often in the file of the tasks.
        with self._collected() if tasks is not None else suppress(InvalidInput):
            engine = build_reward_engine(reward_config(config), self._base_dir)
            asyncio.run(engine.close())
            self._answers(engine.oracles, tasks.by_agent.values() if tasks is not None else ())
        if num_bytes * config.run.group_size > REWARDS_BYTES_MAX:
            self.mistakes.append(
                ConfigError(
                    f"`run.group_size`: the rewards of a group must have at most {REWARDS_BYTES_MAX} bytes, and "
                    f"{config.run.group_size} episodes with {len(names)} rewards each have at least "
                    f"{num_bytes * config.run.group_size}; lower run.group_size to {REWARDS_BYTES_MAX // num_bytes}, "
                    "or let the scorers return fewer rewards",
                    key="run.group_size",
                )
            )
        if config.run.success_reward not in names:
            self.mistakes.append(
                ConfigError(
                    f"`run.success_reward`: no scorer gives a reward called `{config.run.success_reward}`; "
                    f"known: {', '.join(names)}; set run.success_reward to one of these",
                    key="run.success_reward",
                )
            )

    def _answers(self, oracles: Oracles, tasks: Iterable[PoolTask]) -> None:
        """Check that tasks of files have answers in the answer files."""
        for task in tasks:
            if names_record(task.oracle_ref):
                try:
                    oracles.resolve(task.oracle_ref)
                except UnknownOracle as err:
                    what = f"`reward.answer_files`: task {task.task_id}: {err.message}"
                    self.mistakes.append(ConfigError(what, key="reward.answer_files"))

    def _engine(self) -> Any:
        """Return the settings of the engine. None for an engine that does not run the model of the run."""
        config, inference = self._config, self._config.inference
        engine = with_model(inference.engine, self._base_dir, self._model)
        can = INFERENCE_ENGINES.make(engine, self._base_dir).capabilities
        known = sorted(can.outputs)
        if config.rollout.pin != "none" and can.versions_max < 2:
            self.mistakes.append(
                ConfigError(
                    f"`rollout.pin` {config.rollout.pin} needs an engine with several sets of weights, and this one "
                    "has one; set inference.engine.options.versions_max to 2 or more if the engine has this option "
                    "(torch has it), or remove rollout.pin",
                    key="rollout.pin",
                )
            )
        for name, endpoint in config.endpoints.items():
            if (
                endpoint.kind == "policy_step"
                and can.versions_max < 2
                and not (endpoint.replay and not endpoint.record)
            ):
                self.mistakes.append(
                    ConfigError(
                        f"`endpoints.{name}.kind` policy_step needs an engine with several sets of weights, and this "
                        "one has one; set inference.engine.options.versions_max to 2 or more if the engine has this "
                        "option (torch has it), or use the kind frozen",
                        key=f"endpoints.{name}.kind",
                    )
                )
        if missing := [name for name in config.rollout.outputs if name not in known]:
            self.mistakes.append(
                ConfigError(
                    f"`rollout.outputs` must be among [{', '.join(known)}], which the engine can return; got "
                    f"[{', '.join(config.rollout.outputs)}]; {self._engines_with(missing)}; set `inference.engine`, or "
                    "choose an agent, scorers and a loss without this output",
                    key="rollout.outputs",
                )
            )
        options = engine_options(inference, self._base_dir)
        if not takes_option(type(options), "model"):
            return None
        longest = config.rollout.limits.context_tokens_max
        if 0 < options.context_max < longest:
            self.mistakes.append(
                ConfigError(
                    f"`rollout.limits.context_tokens_max`: {longest} is beyond the engine's context of "
                    f"{options.context_max} tokens; lower it, or raise inference.engine.options.context_max",
                    key="rollout.limits.context_tokens_max",
                )
            )
        return options

    def _model(self) -> Path:
        """Return the folder of the model, on which the outputs of an engine may depend. `check_model` reports a folder
        without a model."""
        try:
            return model_folder(self._config, self._base_dir)
        except ConfigError:
            return Path("-")

    def _engines_with(self, outputs: Sequence[str]) -> str:
        """Return the built-in engines that can return each output, for a message. The one for tests is not one of
        them."""
        found: dict[str, list[str]] = {output: [] for output in outputs}
        for name in INFERENCE_ENGINES.names:
            with suppress(InvalidInput):  # an engine with required options cannot be constructed without them
                choice = with_model(Extension(name), self._base_dir, self._model)
                can = INFERENCE_ENGINES.make(choice, self._base_dir).capabilities.outputs if name != "fake" else ()
                for output in set(outputs).intersection(can):
                    found[output].append(name)
        return "; ".join(
            f"built-in engines with {output}: {', '.join(names) or 'none'}" for output, names in found.items()
        )


def _is_default(name: str, tool: ToolConfig) -> bool:
    """Return whether every configuration has this tool. A printed configuration adds its description."""
    default = DEFAULT_TOOLS.get(name)
    return default is not None and (tool.profile, tool.function) == (default.profile, default.function)


def _check_tool(config: TrainConfig, name: str) -> None:
    known = config.rollout.tools
    if name not in known:
        raise ConfigError(
            f"`data.source.options.tools`: there is no tool `{name}`; known: {', '.join(known) or 'none'}; "
            "describe it in rollout.tools",
            key="data.source.options.tools",
        )
    if known[name].profile not in config.sandbox.profiles:
        raise ConfigError(
            f"`rollout.tools.{name}.profile`: there is no sandbox profile `{known[name].profile}`; known: "
            f"{', '.join(config.sandbox.profiles)}",
            key=f"rollout.tools.{name}.profile",
        )


def _missing_column(index: int, missing: Sequence[str], known: Sequence[str]) -> ConfigError:
    outputs = sorted({output_of(name) for name in missing})
    return ConfigError(
        f"`rollout.outputs` must contain {', '.join(outputs)}, because `reward.scorers[{index}]` reads the columns "
        f"[{', '.join(missing)}]; samples have [{', '.join(known)}]",
        key="rollout.outputs",
    )


def load_scorer(scorer: ScorerConfig, index: int, base_dir: Path) -> ConfiguredScorer:
    """Return a scorer of the configuration, closed. Raises ConfigError that names the key."""
    try:
        configured = build_scorer(scorer, base_dir)
    except ConfigError as err:
        raise at_key(err, f"reward.scorers[{index}]") from err
    asyncio.run(configured.scorer.close())
    return configured


def engine_options(inference: InferenceConfig, base_dir: Path) -> Any:
    """Return the engine's settings with their defaults; the run's model is `-`. Raises ConfigError that names the
    key."""
    try:
        return INFERENCE_ENGINES.options(with_model(inference.engine, base_dir, lambda: Path("-")), base_dir)
    except ConfigError as err:
        raise at_key(err, "inference.engine") from err


def make_plugins(config: MeshConfig, base_dir: Path) -> Plugins:
    """Return the parts of an update. Raises ConfigError for a name, an option, or requests that contradict each
    other."""
    from rollmesh.trainer.plugins import Plugins

    try:
        return Plugins(config.learner, reward_weights=config.reward.weights, base_dir=base_dir)
    except ValueError as err:
        raise ConfigError(f"`learner`: {err}", key="learner") from err

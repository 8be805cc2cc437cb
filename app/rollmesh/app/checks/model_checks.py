"""Find mistakes about the model: its files, and whether the engine, the trainer and the rollout workers support it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rollmesh.app.checks.task_survey import TaskSurvey
from rollmesh.app.config import TrainConfig
from rollmesh.demo.config import demonstrated_sources
from rollmesh.mesh.tool_descriptions import rollout_config
from rollmesh.services.data.mixture_source import single_sources
from rollmesh.services.data.source import SOURCES
from rollmesh.services.inference.engine import INFERENCE_ENGINES, Engine, takes_option
from rollmesh.services.learner.engine import TRAINERS
from rollmesh.services.rollout.agent import AGENTS
from rollmesh.services.rollout.tokenizer import ChatTokenizer, eos_ids, load_tokenizer
from rollmesh.services.rollout.tool_calls.choice import tool_call_parser, why_unread
from rollmesh.services.rollout.tools import tool_schema
from rollmesh.shared.codec.checks import ARRAY_BYTES_MAX
from rollmesh.shared.errors import ConfigError, InvalidInput, MeshError
from rollmesh.shared.weights.model_folder import check_positions, find_model

if TYPE_CHECKING:
    from rollmesh.trainer.memory_plan import MemoryPlan
    from rollmesh.trainer.routes import RouteShape

_ENGINE_DEVICE = "inference.engine.options.device"


def check_made_model(config: TrainConfig, base_dir: Path, engine: Any) -> None:
    """Check the settings of `made_model`. Raises ConfigError."""
    from rollmesh.demo.make_model import resolve

    plan = config.model_plan(base_dir)
    assert plan is not None
    assert plan.tasks is not None
    shape, _ = resolve(plan)
    demonstrated_sources(plan, base_dir)
    for _, demonstrated in single_sources(plan.tasks, "made_model.tasks"):
        for key, chosen in single_sources(config.data.source):
            if demonstrated.located(base_dir).name != chosen.located(base_dir).name:
                continue
            mine, theirs = SOURCES.options(demonstrated, base_dir), SOURCES.options(chosen, base_dir)
            if _held_out(mine) != _held_out(theirs):
                raise ConfigError(
                    f"`made_model.tasks`: validation_share and test_share must equal those of {key}, because the warm "
                    "start would see test tasks otherwise",
                    key="made_model.tasks",
                )
    if engine is not None:
        key = "inference.engine.options.context_max"
        check_positions({"max_position_embeddings": shape.context_max}, engine.context_max, model="made_model", key=key)
    for mistake in _devices(config, base_dir, engine):
        raise mistake


def _held_out(options: Any) -> tuple[float, float]:
    return options.validation_share, options.test_share


def check_model(config: TrainConfig, base_dir: Path, engine: Any, tasks: TaskSurvey) -> list[MeshError]:
    """Return every mistake about the model in a folder. `engine` are the settings of an engine that runs it, otherwise
    None."""
    mistakes: list[MeshError] = list(_devices(config, base_dir, engine))
    if engine is None and not _trains_model(config, base_dir):
        return mistakes
    try:
        folder = model_folder(config, base_dir)
    except ConfigError as err:
        return [*mistakes, err]
    try:
        vocabulary = _vocabulary(folder)
    except ConfigError as err:
        return [*mistakes, err]
    if any(mistake.metadata.get("key") == _ENGINE_DEVICE for mistake in mistakes):
        engine = None  # without its device, the engine can run no model
    for step in (_check_served, _check_weights):
        try:
            step(config, base_dir, folder, engine)
        except InvalidInput as err:
            mistakes.append(err)
    try:
        tokenizer = load_tokenizer(folder, config.rollout.format)
        _ = tokenizer.format
        check_vocabulary(folder, tokenizer, vocabulary)
        if calls_tools(config, tasks, base_dir) and not config.rollout.format.names_calls:
            _refuse_unread(tokenizer)
        _check_prompts(config, tokenizer, tasks)
    except InvalidInput as err:
        mistakes.append(err)
    return mistakes


def _vocabulary(folder: Path) -> int:
    """Return the number of rows of the model's embedding; the largest number if its configuration does not name it.
    Raises ConfigError if the configuration cannot be read."""
    from rollmesh.trainer.model_files import read_config

    try:
        return int(getattr(read_config(folder).get_text_config(), "vocab_size", sys.maxsize))
    except ValueError as err:
        raise ConfigError(f"`model`: {err}; correct the file, or take that of the original model", key="model") from err


def check_vocabulary(folder: Path, tokenizer: ChatTokenizer, vocabulary: int) -> None:
    """Raise ConfigError if the tokenizer, or a token that ends a sequence, has an id for which the embedding has no
    row.

    Added tokens may be beyond it if the chat format does not use them, such as the place of an image in some models for
    text alone.
    """
    words = [token for token in tokenizer.format.turn_ends if (tokenizer.token_id(token) or 0) >= vocabulary]
    if words or tokenizer.num_plain_ids > vocabulary:
        what = (
            f"{words[0]} has the id {tokenizer.token_id(words[0])}" if words else f"it has {tokenizer.num_ids} tokens"
        )
        raise ConfigError(
            f"`model`: the tokenizer in {folder} must fit the embedding of {vocabulary} rows (vocab_size), but {what}; "
            "take the tokenizer of this model, or resize its embedding",
            key="model",
        )
    for name in ("config.json", "generation_config.json"):
        for token in eos_ids(folder / name):
            if token >= vocabulary:
                raise ConfigError(
                    f"`model`: eos_token_id in {folder / name} must be in [0, {vocabulary}), got {token}; name the "
                    "token that ends a sequence",
                    key="model",
                )


def model_folder(config: TrainConfig, base_dir: Path) -> Path:
    """Return the folder of the configured model. Raises ConfigError if it does not hold a model."""
    if not config.model:
        raise ConfigError(
            "`model`: name a folder with a model in transformers format, or give `made_model`", key="model"
        )
    return find_model(config.model, base_dir)


def check_reference(config: TrainConfig, base_dir: Path) -> None:
    """Check the folder of a reference model, and compare it with the model in a folder. Raises ConfigError."""
    from transformers import AutoConfig

    from rollmesh.trainer.reference import check_same_family

    key = "learner.reference.path"
    folder = find_model(config.learner.reference.path, base_dir, key)
    if not config.model:
        return  # the trainer compares it with the model of `made_model`
    policy = model_folder(config, base_dir)
    try:
        reference = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as err:
        raise ConfigError(f"`{key}`: transformers cannot read the model in {folder}: {err}", key=key) from err
    check_same_family(reference, AutoConfig.from_pretrained(policy))


def _check_served(config: TrainConfig, base_dir: Path, folder: Path, engine: Any) -> None:
    """Check what the engine can serve."""
    if engine is not None:
        cls: type[Engine] = INFERENCE_ENGINES.find_class(config.inference.engine.name, base_dir)
        cls.check_model(msgspec.structs.replace(engine, model=str(folder)))


def _trains_model(config: TrainConfig, base_dir: Path) -> bool:
    try:
        return bool(TRAINERS.find(config.learner.engine.name, base_dir).trains_model)
    except ConfigError:
        return False  # reported at its key


def _check_weights(config: TrainConfig, base_dir: Path, folder: Path, engine: Any) -> None:
    """Check what the trainer can load and train."""
    from transformers.utils import logging

    from rollmesh.trainer.lora import inject
    from rollmesh.trainer.memory_plan import NoMemoryPlan, check_memory, is_small
    from rollmesh.trainer.model_files import load_model
    from rollmesh.trainer.router_replay import RouterReplay
    from rollmesh.trainer.self_test import check_shared, choose_forward
    from rollmesh.trainer.spread_model import SpreadCopy

    progress: Any = logging
    progress.disable_progress_bar()  # a bar would be mixed with the messages
    device = config.learner.device
    try:
        if not _why_no_device(device) and not is_small(folder, device):
            with contextlib.suppress(NoMemoryPlan):  # `memory_note` reports it
                check_memory(_memory_plan(config, base_dir, folder), device, config.learner)
        model = load_model(folder)
    except ValueError as err:
        raise ConfigError(f"`model`: {err}; the folder must be one that transformers loads", key="model") from err
    spread = SpreadCopy(model)
    try:
        choice = choose_forward(model, spread)
    except ValueError as err:
        raise ConfigError(f"`model`: {err}", key="model") from err
    if config.learner.packing.shared_row_tokens:
        check_shared(model, choice, spread)
    if config.learner.lora.rank:
        inject(model, config.learner.lora)
    if config.learner.router_replay:
        check_records(config, RouterReplay(model).shape)


def check_records(config: TrainConfig, shape: RouteShape) -> None:
    """Raise ConfigError if an answer may have more records of chosen experts than an array of a segment can have."""
    limits, sampling, key = config.rollout.limits, config.rollout.sampling, "rollout.sampling.max_tokens"
    longest = min(sampling.max_tokens, limits.tokens_max, limits.context_tokens_max)
    if longest * shape.bytes_per_token > ARRAY_BYTES_MAX:
        raise ConfigError(
            f"`{key}` must be <= {ARRAY_BYTES_MAX // shape.bytes_per_token} with `learner.router_replay`, got "
            f"{sampling.max_tokens}: the {shape.width} chosen experts of a token take {shape.bytes_per_token} bytes, "
            f"and those of an answer at most {ARRAY_BYTES_MAX}; lower it, or set `learner.router_replay` to false",
            key=key,
        )


def memory_note(config: TrainConfig, base_dir: Path) -> list[str]:
    """Return a remark on the memory that the trainer needs for a valid configuration; none if it does not train a model
    in a folder."""
    if not config.model or not _trains_model(config, base_dir):
        return []
    from rollmesh.trainer.memory_plan import NoMemoryPlan

    try:
        return [f"memory plan: the learner needs {_memory_plan(config, base_dir, model_folder(config, base_dir))}"]
    except NoMemoryPlan as error:
        return [f"memory plan: not available, {error}"]


def _memory_plan(config: TrainConfig, base_dir: Path, folder: Path) -> MemoryPlan:
    from rollmesh.trainer.memory_plan import plan_folder
    from rollmesh.trainer.plugins import Plugins

    plugins = Plugins(config.learner, reward_weights=config.reward.weights, base_dir=base_dir)
    settings = config.learner
    if settings.reference.path:
        path = str(find_model(settings.reference.path, base_dir, "learner.reference.path"))
        settings = msgspec.structs.replace(settings, reference=msgspec.structs.replace(settings.reference, path=path))
    return plan_folder(
        settings,
        folder,
        plugins,
        longest=config.rollout.limits.context_tokens_max,
        ranks=settings.compute.ranks,
        copies=settings.copies_on_device,
        device=settings.device,
    )


def calls_tools(config: TrainConfig, tasks: TaskSurvey, base_dir: Path) -> bool:
    """Return whether an agent that reads calls by the chat format gets a task with tools."""
    agents = config.rollout.agents_by_name
    for name in (agents[name].name for name, tools in tasks.tools_by_agent.items() if tools and name in agents):
        with contextlib.suppress(ConfigError):  # the check of the agents reports one that cannot be loaded
            if AGENTS.find_class(name, base_dir).parses_calls:
                return True
    return False


def _refuse_unread(tokenizer: ChatTokenizer) -> None:
    """Raise ConfigError if `parse_call` of the agents does not read the calls that the chat template writes.

    The agents write no call through the template. So `rollout.format` may name other calls, for a model that writes
    those.
    """
    if why := why_unread(tokenizer, tool_call_parser(tokenizer.format)):
        raise ConfigError(
            f"`rollout.format`: tasks list tools, and their calls would be taken for answers: {why}; set "
            "`tool_call_start`, `tool_call_end` and `tool_call_body` to what the model writes if one of the bodies "
            "fits, or take an agent that reads these calls",
            key="rollout.format",
        )


def call_note(config: TrainConfig, base_dir: Path) -> list[str]:
    """Return a remark on calls of an agent that is a program, whose tools are not known here, if they are not read."""
    if not config.model or {"program", "url"}.isdisjoint(a.name for a in config.rollout.agents_by_name.values()):
        return []
    tokenizer = load_tokenizer(model_folder(config, base_dir), config.rollout.format)
    why = why_unread(tokenizer, tool_call_parser(tokenizer.format, config.rollout.openai.tool_calls, base_dir))
    return (
        [f"note: requests with tools will be rejected: {why}; name a parser in rollout.openai.tool_calls"]
        if why
        else []
    )


def _check_prompts(config: TrainConfig, tokenizer: ChatTokenizer, tasks: TaskSurvey) -> None:
    limit = config.rollout.limits.context_tokens_max
    tools = rollout_config(config).tools
    found = [
        (task.task_id, length)
        for task in tasks.longest
        if (
            length := tokenizer.encode_prompt(
                task.messages, [tool_schema(name, tools[name]) for name in task.tools if name in tools]
            ).size
        )
        >= limit
    ]
    if found:
        (name, length), more = found[0], f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise ConfigError(
            f"`rollout.limits.context_tokens_max`: the prompt of task {name} has {length} tokens, the context "
            f"{limit}{more}; raise it and inference.engine.options.context_max, or drop the task",
            key="rollout.limits.context_tokens_max",
        )


def _devices(config: TrainConfig, base_dir: Path, engine: Any) -> Iterator[MeshError]:
    """Yield the mistakes about devices that this host does not have."""
    named = {"learner.device": config.learner.device} if _trains_model(config, base_dir) else {}
    if engine is not None and takes_option(type(engine), "device"):
        named[_ENGINE_DEVICE] = engine.device
    for key, name in named.items():
        if why := _why_no_device(name):
            yield ConfigError(f"`{key}`: {why}; set it to cpu, or run on a host with the device", key=key)


def _why_no_device(name: str) -> str:
    import torch

    try:
        device = torch.device(name)
    except RuntimeError as err:
        return f"{name!r} is not a torch device: {str(err).splitlines()[0]}"
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        return f"{name!r} does not exist on this host: torch finds {torch.cuda.device_count()} CUDA devices"
    return ""

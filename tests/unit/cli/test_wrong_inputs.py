"""Wrong inputs of a user, a row each: what `rollmesh check` says about it, in one message with its place and remedy.

Inputs that cannot train are mistakes (exit code 2). Inputs that are legal and rarely meant are notes. To add an input,
add a row.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rollmesh.app.checks import config_checks
from rollmesh.app.config import load_train_config
from rollmesh.cli.__main__ import app
from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.services.data.config import build_pools
from rollmesh.services.data.task import PoolTask, Split, TaskPool
from rollmesh.trainer.model_files import write_model_folder

SMALL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48)
TASKS = [{"question": f"{n}+1", "answer": str(n + 1)} for n in range(40)]
CONFIG = """
data: {source: {name: jsonl, options: {path: tasks.jsonl}}}
rollout: {limits: {context_tokens_max: 512}}
inference: {engine: {options: {context_max: 512}}}
counts: {sandbox: 0}
run: {eval_every: 0}
model: model
"""
FILES = {
    "late_agent.py": "class Agent:\n    async def run(self, task): ...\n",
    "scorer.py": "class Scorer:\n    async def score(self): return 1.0\n",
    "called.py": "class Agent:\n    async def run(self, task, env, *, tries=3): ...\n",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model_folder(build_tiny_model(SMALL, seed=0), build_tokenizer(), folder)
    return folder


@pytest.fixture
def mine(tmp_path: Path, made: Path) -> Path:
    """A folder with a valid configuration."""
    shutil.copytree(made, tmp_path / "model")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    write_tasks(tmp_path, TASKS)
    (tmp_path / "mine.yaml").write_text(CONFIG)
    return tmp_path


def write_tasks(folder: Path, tasks: list[dict[str, str]]) -> None:
    (folder / "tasks.jsonl").write_text("".join(f"{json.dumps(task)}\n" for task in tasks))


def check(folder: Path, *overrides: str) -> Result:
    done = CliRunner().invoke(app, ["check", str(folder / "mine.yaml"), *overrides])
    assert "Traceback" not in done.output
    return done


# Settings and files, reported together --------------------------------------------------------------------------

SETTINGS: list[tuple[str, str]] = [
    ("rollout.tools.stock={profile: calc, function: call}", r"`rollout.tools.stock`: no task lists this tool, so no episode has it; add it to `data.source.options.tools`"),
    ("rollout.agent=late_agent.py:Agent", r"`rollout.agent`: agent `.*late_agent.py:Agent` must have a method `async def run\(self, task, env\)`"),
    ("reward.scorers=['scorer.py:Scorer']", r"`reward.scorers\[0\]`: .*must have a method `async def score\(self, item\)`"),
    ("security={ca: gone.pem, certificate: gone.crt, key: gone.key}", r"`?security`?.*gone.key: cannot read this secret: No such file"),
    ("run.loggers=[wandb]", r"`run.loggers`: wandb requires the package wandb: pip install wandb"),
    ("inference.engine.options.device=cuda", r"`inference.engine.options.device`: 'cuda' does not exist on this host"),
]  # fmt: skip


def test_wrong_settings_are_reported_together_and_nothing_else(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "wandb" else real(name, *more))
    done = check(mine, *(override for override, _ in SETTINGS))
    assert done.exit_code == 2
    for override, expected in SETTINGS:
        assert re.search(expected, done.stderr), (override, done.stderr)
    assert done.stderr.startswith(f"error: {len(SETTINGS)} mistakes:"), done.stderr


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ("{type: objekt, properties: []}", "its `type` must be object, got 'objekt'"),
        ("{type: object, properties: []}", r"its `properties` must map each argument to a JSON schema, got \[\]"),
        ("{type: object, properties: {a: string}}", "its `properties` must map"),
        ("{type: object, properties: {a: {type: str}}}", "the type of `a` must be one of string, .*got 'str'"),
        ("{type: object, properties: {a: {type: string}}, required: [b]}", r"its `required` must list keys of `properties` \(a\), got \['b'\]"),
    ],
)  # fmt: skip
def test_parameters_of_a_tool_that_are_not_a_schema_are_reported(mine: Path, parameters: str, expected: str) -> None:
    done = check(mine, f"rollout.tools.calculator={{profile: calc, function: call, parameters: {parameters}}}")
    assert done.exit_code == 2
    expected = f"`rollout.tools.calculator.parameters` must be the JSON schema of an object, .*: {expected}"
    assert re.search(expected, done.stderr), done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("[python, not_here.py]", r"options.command\[1\] must be a file, because python executes it, got 'not_here.py': there is no .*/not_here.py"),
        ("[bash, not_here.sh]", r"options.command\[1\] must be a file, because bash executes it"),
        ("[not_a_program]", r"options.command\[0\] must be an executable file or a program on PATH, got 'not_a_program'"),
        pytest.param("[python, -c, pass]", "", marks=pytest.mark.slow),
        pytest.param("[python, called.py, out.py]", "", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_program_that_does_not_exist_is_reported(mine: Path, command: str, expected: str) -> None:
    done = check(mine, f"rollout.agent={{name: program, options: {{command: {command}}}}}")
    assert done.exit_code == (2 if expected else 0), done.stderr
    assert re.search(expected, done.stderr), done.stderr


# Tasks ----------------------------------------------------------------------------------------------------------------


def test_the_longest_prompt_is_compared_with_the_context_wherever_it_is(mine: Path) -> None:
    tasks = [*TASKS * 3, {"question": "1" * 600, "answer": "1"}, {"question": "2" * 700, "answer": "1"}, *TASKS]
    write_tasks(mine, tasks)
    done = check(mine)
    assert done.exit_code == 2
    assert re.search(
        r"the prompt of task tasks-122 has 70\d tokens, the context 512 \(and 1 more\); raise it", done.stderr
    )


@pytest.mark.slow  # it checks the model
def test_the_tools_of_a_task_count_for_the_length_of_its_prompt(mine: Path) -> None:
    write_tasks(mine, [*TASKS, {"question": "1" * 505, "answer": "1"}])
    assert check(mine).exit_code == 0
    done = check(mine, "data.source.options.tools=[calculator]")
    assert re.search(r"the prompt of task tasks-41 has 5[12]\d tokens, the context 512; raise it", done.stderr)


def test_a_tool_of_a_later_task_is_checked(mine: Path) -> None:
    """A source of a user may give each task other tools."""
    (mine / "source.py").write_text(
        "from rollmesh.services.data.task import PoolTask, Split\n"
        "from rollmesh.shared.domain.trajectory import Message\n"
        "class Source:\n"
        "    def __init__(self, *, base_dir): ...\n"
        "    def tasks(self):\n"
        "        for n in range(4):\n"
        "            tools = ('abacus',) if n == 3 else ()\n"
        "            yield PoolTask(task_id=str(n), messages=(Message(role='user', content=str(n)),), tools=tools, split=Split.TRAIN)\n"
    )
    done = check(mine, "data.source=source.py:Source")
    assert re.search(r"there is no tool `abacus`; known: calculator, python", done.stderr)


# Notes ----------------------------------------------------------------------------------------------------------------

NOTES: list[tuple[str, str]] = [
    ("rollout.sampling.temperature=0", r"note: rollout.sampling.temperature is 0, so the answers of a group are equal and train nothing \(ZERO_VARIANCE\)"),
    ("rollout.sampling.max_tokens=5000", r"note: rollout.sampling.max_tokens is 5000, but rollout.limits.context_tokens_max ends every turn at 512 tokens"),
    ("learner.optimizer.lr=5.0", r"note: learner.optimizer.lr is 5, and models rarely learn above 0.1; 1e-6 is the default"),
    ("run.batch_groups=1000", r"note: run.batch_groups is 1000, but the train split has \d\d tasks; a batch repeats tasks"),
]  # fmt: skip


def test_values_that_are_legal_and_rarely_meant_are_noted(mine: Path) -> None:
    write_tasks(mine, [*TASKS, {"question": "3+1", "answer": "5"}, {"question": "4+1", "answer": "5"}])
    done = check(mine, *(override for override, _ in NOTES))
    assert done.exit_code == 0, done.stderr
    for override, expected in NOTES:
        assert re.search(expected, done.stderr), (override, done.stderr)
    assert re.search(
        r"note: 1 prompts have several answers in data.source, such as that of the tasks tasks-4, tasks-41; each",
        done.stderr,
    )
    assert done.output.rstrip().endswith(done.stderr.rstrip()), "what matters comes after the settings"


def test_a_configuration_without_odd_values_has_no_note(mine: Path) -> None:
    said = check(mine).stderr
    assert "note:" not in said
    assert said.startswith(f"model {mine.name}/model with "), "a folder called model does not say whose model it is"


# Models ---------------------------------------------------------------------------------------------------------------


def change(name: str, **values: Any) -> Callable[[Path], None]:
    def write(model: Path) -> None:
        path = model / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return write


def more_tokens(model: Path) -> None:
    path = model / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab |= {f"more{n}": len(vocab) + n for n in range(60)}
    path.write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (change("config.json", num_hidden_layers=5, layer_types=["full_attention"] * 3), r"`model`: no model can be loaded from .*: config.json cannot be read: .*num_hidden_layers.*layer_types"),
        (change("config.json", num_hidden_layers="five"), r"`model`: no model can be loaded from .*: config.json cannot be read: "),
        (change("config.json", eos_token_id=9999), r"`model`: eos_token_id in .*/config.json must be in \[0, 112\), got 9999; name the token"),
        (change("generation_config.json", eos_token_id=[1, 9999]), r"`model`: eos_token_id in .*/generation_config.json must be in \[0, 112\), got 9999"),
        (more_tokens, r"`model`: the tokenizer in .* must fit the embedding of 112 rows \(vocab_size\), but it has \d+ tokens"),
        (lambda model: (model / "tokenizer.json").unlink(), r"`model`: .*tokenizer.json does not exist; copy the tokenizer of the model"),
    ],
)  # fmt: skip
def test_a_model_whose_files_do_not_fit_is_reported(mine: Path, wrong: Callable[[Path], None], expected: str) -> None:
    wrong(mine / "model")
    done = check(mine)
    assert done.exit_code == 2, done.output
    assert re.search(expected, done.stderr), done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize("name", ["q.gguf", "models/q.gguf", "model/model.safetensors"])
def test_a_file_in_place_of_a_model_folder_is_reported(mine: Path, name: str) -> None:
    done = check(mine, f"model={name}")
    assert re.search(
        rf"`model` must be a folder with a model .*got the file .*{name}; name the folder, or convert", done.stderr
    )


@pytest.mark.slow  # it checks the model several times
def test_calls_that_no_parser_reads_are_a_mistake_of_a_run_with_tools(mine: Path) -> None:
    path = mine / "model" / "chat_template.jinja"
    path.write_text(
        path.read_text().replace("{{- '<tool_call>' -}}", "{{- '<tool_call>' + call.function.name + '=' -}}")
    )
    tools = "data.source.options.tools=[calculator]"
    done = check(mine, tools)
    assert re.search(
        r"`rollout.format`: tasks list tools, and their calls would be taken for answers: the chat template writes a call as '<tool_call>add=",
        done.stderr,
    )
    assert check(mine).exit_code == 0, "without tools there are no calls"
    assert check(mine, tools, "rollout.format.tool_call_body=json").exit_code == 0, (
        "the agent reads what the user names"
    )
    program = check(mine, "rollout.agent={name: program, options: {command: [python, called.py]}}")
    assert program.exit_code == 0
    assert "note: requests with tools will be rejected: the chat template writes a call as" in program.stderr


class Counting:
    """A pool that counts how often each task is read."""

    def __init__(self, pool: TaskPool, num_reads: Counter[tuple[str, int]]) -> None:
        self._pool, self._num_reads, self.digest = pool, num_reads, pool.digest

    def __len__(self) -> int:
        return len(self._pool)

    def task(self, position: int) -> PoolTask:
        self._num_reads[self.digest, position] += 1
        return self._pool.task(position)

    def position(self, task_id: str) -> int | None:
        return self._pool.position(task_id)

    def label(self, position: int, name: str) -> str:
        return self._pool.label(position, name)


def test_each_task_is_read_once_for_all_mistakes(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_reads: Counter[tuple[str, int]] = Counter()

    def counting(*arguments: Any) -> Mapping[Split, TaskPool]:
        return {split: Counting(pool, num_reads) for split, pool in build_pools(*arguments).items()}

    monkeypatch.setattr(config_checks, "build_pools", counting)
    config = load_train_config(mine / "mine.yaml", ["data.source.options.tools=[calculator]"])
    assert config_checks.find_mistakes(config, mine) == []
    assert (num_reads.total(), set(num_reads.values())) == (len(TASKS), {1})


def test_an_engine_that_does_not_exist_hides_no_other_mistake(mine: Path) -> None:
    done = check(
        mine, "counts.sandbox=1", "sandbox.engine=nowhere", "sandbox.profiles.mine.prelude='1'", "rollout.agent=none"
    )
    assert done.exit_code == 2
    assert all(f"`{key}`" in done.stderr for key in ("sandbox.engine", "rollout.agent")), done.stderr
    assert "error: 2 mistakes:" in done.stderr


# The host -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # it checks the model several times
def test_a_host_without_a_nats_server_is_reported_at_once(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, **more: None if name == "nats-server" else real(name, **more))
    for command in (["check"], ["train"], ["train", "--out", str(mine / "run")]):
        done = CliRunner().invoke(app, [command[0], str(mine / "mine.yaml"), *command[1:]])
        assert done.exit_code == 2
        assert (
            "error: `bus.url` is empty and there is no nats-server on the PATH; activate the environment" in done.stderr
        )
    assert check(mine, "bus.url=nats://127.0.0.1:4222").exit_code == 0

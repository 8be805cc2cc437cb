"""The command itself: instant help, and one message with place and remedy for every mistake."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import yaml
from typer.testing import CliRunner, Result

from rollmesh.app.config import DEMO_CONFIG
from rollmesh.app.run_folder import RunFolder
from rollmesh.cli.__main__ import app
from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.trainer.model_files import write_model_folder

from .recorded import ORIGIN

ROOT = Path(__file__).parents[3]
SMALL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48)
FEW_TASKS = "data.source.options.num_train=64"
"""A change to the configuration of the demo: to generate all its tasks takes longer than to check it."""
TASKS = '{"question": "1+1", "answer": "2"}\n{"question": "2+2", "answer": "4"}\n'


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def refused(*arguments: str) -> str:
    """Return the message about invalid input: one message, exit code 2, no traceback."""
    done = command(*arguments)
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    lines = done.stderr.strip().splitlines()
    assert lines[0].startswith("error: ")
    assert len(lines) == 1, lines
    return lines[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model_folder(build_tiny_model(SMALL, seed=0), build_tokenizer(), folder)
    return folder


def config_file(folder: Path, text: str = "") -> Path:
    """Write a configuration and its task file, with `text` added."""
    (folder / "tasks.jsonl").write_text(TASKS * 20)
    path = folder / "mine.yaml"
    path.write_text(
        "data: {source: {name: jsonl, options: {path: tasks.jsonl}}}\nrollout: {limits: {context_tokens_max: 512}}\n"
        "inference: {engine: {options: {context_max: 512}}}\n"
        f"counts: {{sandbox: 0}}\n{text}"
    )
    return path


# Help ---------------------------------------------------------------------------------------------------------------


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, contextlib, rollmesh.cli.__main__ as m\n"
        "with contextlib.suppress(SystemExit): m.app(['train', '--help'])\n"
        "print([n for n in ('torch', 'transformers', 'grpc', 'nats', 'numpy', 'matplotlib', 'google.protobuf') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_lists_what_a_newcomer_needs_first() -> None:
    shown = command("--help").stdout
    commands = [line.split()[0] for line in shown.partition("Commands:")[2].splitlines() if line.strip()]
    assert commands[:3] == ["demo", "train", "check"]


def test_version_is_printed() -> None:
    done = command("--version")
    assert (done.exit_code, done.stdout.split()[0]) == (0, "rollmesh")


# check --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "configs").glob("*.yaml")))
def test_every_configuration_in_the_repository_resolves_and_says_what_it_is_for(name: str, tmp_path: Path) -> None:
    path = ROOT / "configs" / name
    head = path.read_text().partition("\nrun:")[0]
    assert all(re.search(rf"^# {word} ", head, re.MULTILINE) for word in ("Hardware", "Purpose", "Expected"))
    done = command("check", str(path), "run.seed=5")
    assert done.exit_code == 0, done.output
    assert "seed: 5" in done.stdout
    resolved = ROOT / "configs" / f"{path.stem}.resolved-for-test.yaml"  # user files are looked up beside it
    try:
        resolved.write_text(done.stdout)
        again = command("check", str(resolved))
    finally:
        resolved.unlink()
    assert again.stdout == done.stdout, "the defaults are written out as settings that mean the same"


def test_check_writes_out_the_defaults_in_force(tmp_path: Path, model: Path) -> None:
    done = command("check", str(config_file(tmp_path, f"model: {model}\nrun: {{eval_every: 0}}\n")))
    assert done.exit_code == 0, done.output
    found = yaml.safe_load(done.stdout)
    assert found["learner"]["optimizer"]["lr"] == 1e-6, "safe for a model of billions of parameters"
    assert found["learner"]["loss"][0]["name"] == "ppo_clip"
    assert found["inference"]["engine"]["options"]["dtype"] == "float32"
    assert found["reward"]["finalizers"][0]["options"], "the finalizer's"
    assert found["rollout"]["format"]["turn_end"] == "<|end|>"
    assert re.search(
        r"model\d* with [\d.]+k parameters, grpo with loss \w+, lr 1e-06, stop token <\|end\|>, context 512, bound 2",
        done.stderr,
    )


def test_check_notes_the_kinds_of_nodes_that_have_to_join() -> None:
    done = command("check", str(ROOT / "configs" / "demo.yaml"), "counts.inference=0", "counts.sandbox=0")
    assert done.exit_code == 0, done.output
    assert "counts.inference is 0: the run waits until one joins (rollmesh serve inference --join" in done.stderr
    assert "counts.sandbox is 0, and tasks use the tool `calculator`: the run waits" in done.stderr
    assert "counts.rollout" not in done.stderr


def test_check_finds_every_mistake_in_one_go(tmp_path: Path, model: Path) -> None:
    text = (
        f"model: {model}\nrun: {{updates_maks: 3, group_size: 0, eval_every: 0, seed: much}}\n"
        "reward: {scorers: [{name: 'scorer.py:Scorer', reward: correct}, {name: exakt, reward: other}]}\n"
        "learner: {device: 'cuda:7', optimizer: {lrr: 1}}\n"
    )
    path = config_file(tmp_path, text)
    (tmp_path / "scorer.py").write_text("class Scorer:\n    def score(self, item): return 1.0\n")
    overrides = [
        "rollout.agent=agent.py:Agent",
        "rollout.format.turn_end=<|im_end|>",
        "inference.engine.options.context_max=9999",
    ]
    done = command("check", str(path), *overrides, "data.source.options.path=gone.jsonl")
    assert done.exit_code == 2
    for expected in (
        r"mine.yaml:\d+: `run.updates_maks`: unknown key; did you mean `updates_max`\?",
        r"mine.yaml:\d+: `run.group_size` must be in",
        r"mine.yaml:\d+: `run.seed`: Expected `int`",
        r"gone.jsonl: No such file",
        r"`rollout.agent`: .*there is no file .*agent.py",
        r"`reward.scorers\[0\]`: .*must have a method `async def score",
        r"`reward.scorers\[1\]`: there is no scorer `exakt`",
        r"`learner.device`: 'cuda:7' does not exist on this host",
        r"`learner.optimizer.lrr`: unknown key",
        r"`inference.engine.options.context_max`: 9999 is beyond the 512 positions",
        r"`rollout.format.turn_end`: .*got '<\|im_end\|>': the model has no such token; it writes '<\|end\|>'",
    ):
        assert re.search(expected, done.stderr), (expected, done.stderr)
    assert done.stderr.startswith("error: 11 mistakes:"), done.stderr


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model_type": "bert"}, r"`model`: model_type `bert` in .* cannot be served"),
        ({"max_position_embeddings": 64}, r"context_max`: 512 is beyond the 64 positions .*at most 64"),
    ],
)
def test_a_model_that_the_engine_cannot_serve_is_reported_by_check(
    tmp_path: Path, model: Path, change: dict[str, object], expected: str
) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    done = command("check", str(config_file(tmp_path, "model: changed\nrun: {eval_every: 0}\n")))
    assert done.exit_code == 2
    assert re.search(expected, done.stderr)


def test_fewer_held_out_tasks_than_an_evaluation_wants_are_reported(tmp_path: Path, model: Path) -> None:
    path = config_file(tmp_path, f"model: {model}\nrun: {{eval_every: 1, eval_split: train}}\n")
    done = command("check", str(path))
    assert "note: run.eval_tasks is 320, but the train split has 40 tasks" in done.stderr


def test_a_replay_bound_below_the_distance_of_checkpoints_is_reported(tmp_path: Path, model: Path) -> None:
    replay = "replay: {max_staleness: 4, share: 0.5}, batch_groups: 2, group_size: 2"
    path = config_file(tmp_path, f"model: {model}\nrun: {{eval_every: 0, {replay}}}\n")
    assert "note: run.replay.max_staleness is 4, but samples enter" in command("check", str(path)).stderr
    assert "enter the replay log" not in command("check", str(path), "learner.checkpoint_every=2").stderr


def test_a_prompt_longer_than_the_context_is_reported(tmp_path: Path, model: Path) -> None:
    path = config_file(tmp_path, f"model: {model}\nrun: {{eval_every: 0}}\n")
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"question": "1" * 600, "answer": "2"}) + "\n" + TASKS)
    message = refused("check", str(path))
    assert re.search(r"the prompt of task .* has 60\d tokens, the context 512", message)


def test_demo_needs_no_file_outside_the_package() -> None:
    package = ROOT / "app" / "rollmesh" / "app"
    assert DEMO_CONFIG.resolve().is_relative_to(package)
    assert (ROOT / "configs" / "demo.yaml").resolve() == DEMO_CONFIG.resolve()


def test_check_resolves_users_objects_beside_the_configuration(tmp_path: Path, model: Path) -> None:
    (tmp_path / "agent.py").write_text("class Agent:\n    async def run(self, task, env): ...\n")
    text = f"model: {model}\nrun: {{eval_every: 0}}\n"
    done = command("check", str(config_file(tmp_path, text)), "rollout.agent=agent.py:Agent")
    assert done.exit_code == 0, done.output
    assert "agent:\n    name: agent.py:Agent\n" in done.stdout


def test_a_rollout_without_training_needs_no_group(tmp_path: Path, model: Path) -> None:
    path = str(config_file(tmp_path, f"model: {model}\nrun: {{eval_every: 0, group_size: 1}}\n"))
    assert "must be >= 2 for the estimator grpo, got 1" in refused("check", path)
    done = command("check", path, "run.export_groups=8")
    assert done.exit_code == 0, done.output


# Bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.update_max=3", r"`run.update_max`: unknown key; did you mean `updates_max`\?"),
        ("run.updates_max=many", r"`run.updates_max`: Expected `int`, got `str` \(found 'many'\)"),
        ("run.publish_every=4", r"`run.publish_every` must be <= max_staleness \+ 1 = 3, got 4: .*raise max_staleness or lower publish_every"),
        ("run.name=my/run", r"`run.name` must match .* got 'my/run'"),
        ("run.success_reward=corect", r"`run.success_reward`: no scorer gives .*`corect`; known: correct"),
        ("run.eval_split=dev", r"`run.eval_split` must be one of train, validation, test; got 'dev'"),
        ("counts.sandbox=-1", r"`counts.sandbox` must be >= 0, got -1"),
        ("data.source.options.tools=[abacus]", r"`data.source.options.tools`: there is no tool `abacus`; known: calculator, python"),
        ("data.selector.name=best", r"there is no selector `best`; known: uniform, thompson"),
        ("rollout.agent=mine.py:Agent", r"`mine.py:Agent`: there is no file .*mine.py"),
        ("rollout.limits.context_tokens_max=999", r"999 is beyond the engine's context of 320 tokens; lower it, or raise"),
        ("rollout.outputs=[logits]", r"`rollout.outputs` must be among \[entropy, hidden, kept_mass, mean_logprob, top_k\], which the engine can return; got \[logits\]; built-in engines with logits: none; set"),
        ("rollout.pin=response", r"`rollout.pin` response needs an engine with several sets of weights, and this one has one; set inference.engine.options.versions_max to 2"),
        ("learner.loss=[high_entropy]", r"`rollout.outputs` must contain entropy, which the loss needs, got \[\]"),
        ("learner.estimator=grpoo", r"error: `learner.estimator`: there is no estimator `grpoo`; known: grpo, .*did you mean `grpo`\?"),
        ("learner.loss=[ppo_clip, gspoo]", r"error: `learner.loss\[1\]`: there is no loss term `gspoo`; known: .*did you mean `gspo`\?"),
        ("learner.update_rule=minibatch", r"error: `learner.update_rule`: there is no update rule `minibatch`; .*did you mean `minibatches`\?"),
        ("learner.features={h: {name: entropyy}}", r"error: `learner.features.h`: there is no feature `entropyy`; .*did you mean `entropy`\?"),
        ("learner.estimator={name: grpo, options: {beta: 0.25}}", r"error: `learner.estimator`: options of estimator `grpo`: `beta`: unknown key; known keys: mean, std, "),
        ("learner.loss=[{name: ppo_clip, options: {weight_max: 2}}]", r"error: `learner.loss\[0\]`: options of loss term `ppo_clip`: `weight_max`: unknown key; known keys: clip_low"),
        ("learner.update_rule={name: minibatches, options: {order: reverse}}", r"error: `learner.update_rule`: options of update rule `minibatches`: `order`: unknown key"),
        ("learner.features={h: {name: entropy, options: {top_p: 0.5}}}", r"error: `learner.features.h`: feature `entropy` has no options, got top_p; remove them"),
        ("learner.loss=[drpo]", r"error: `learner`: the loss term drpo compares .*but the update rule minibatches may cut them; set `learner.update_rule`"),
        ("run.group_size=1", r"error: `run.group_size` must be >= 2 for the estimator grpo, got 1"),
        ("learner.estimator=mc_grpo", r"error: `run.group_size` must be odd and >= 3 for the estimator mc_grpo, got 16"),
        ("reward.finalizers=[keep_al]", r"error: `reward.finalizers\[0\]`: there is no finalizer `keep_al`; .*did you mean `keep_all`\?"),
        ("run.replay={share: 0.5}", r"`run.replay.max_staleness`: required, but not given"),
        ("run.replay={max_staleness: 8, priority: newest}", r"`run.replay.priority` must be one of fifo, advantage, return, success_per_task, compensation, got 'newest'"),
        ("run.replay={max_staleness: 8, share: 0.01}", r"`run.replay.share` must be >= .*, one group of batch_groups = "),
        ("inference.engine.options.slots=1", r"`inference.engine`: .*unknown key; did you mean `slots_max`\?"),
        ("recipe=grpoo", r"`recipe`: there is no recipe `grpoo`; known: .*dr_grpo, .*did you mean `grpo`\?"),
        ("learner.optimizer.lrr=1", r"`learner.optimizer.lrr`: unknown key; did you mean `lr`\?"),
        ("made_model.warm_start.level=3", r"`made_model.warm_start`: .*unknown key; did you mean `levels`\?"),
        ("made_model.tasks.options.test_share=0.2", r"`made_model.tasks`: .*must equal those of data.source"),
        ("model=somewhere", r"`model` must be empty if `made_model` is given"),
        ("reward.scorers.0.name=exakt", r"there is no scorer `exakt`; known: exact, math"),
    ],
)  # fmt: skip
def test_mistake_in_a_setting_is_reported_with_its_place_and_remedy(override: str, expected: str) -> None:
    assert re.search(expected, refused("check", str(DEMO_CONFIG), FEW_TASKS, override))


def test_an_estimator_with_memory_is_rejected_with_a_replay_log() -> None:
    replay = ("learner.estimator=risk_po", "run.replay={max_staleness: unlimited}")
    assert "`learner.estimator` must have no memory with `run.replay`, got risk_po" in refused(
        "check", str(DEMO_CONFIG), *replay
    )


def test_recipe_that_needs_an_output_of_another_engine_is_rejected_with_a_remedy() -> None:
    engine = f"inference.engine={ROOT / 'examples' / 'extending' / 'uniform_engine.py'}:UniformEngine"
    assert re.search(
        r"`rollout.outputs` must be among \[\], which the engine can return; got \[entropy\]; built-in engines with entropy: torch, .*; set `inference.engine`",
        refused("check", str(DEMO_CONFIG), FEW_TASKS, "recipe=grpo_high_entropy", engine),
    )


PART = """
class Part:
    needs = {needs}
    rewards = {rewards}

    def __call__(self, inputs):
        return inputs.logprobs.sum(), {{}}
"""


def test_a_part_of_a_user_that_needs_what_the_run_does_not_have(tmp_path: Path, model: Path) -> None:
    path = config_file(
        tmp_path, f"model: {model}\nrun: {{eval_every: 0}}\nreward: {{scorers: [exact], weights: {{exact: 1.0}}}}\n"
    )
    for number, (needs, rewards, expected) in enumerate((
        (["margin"], [], r"`rollout.outputs` must contain margin, which the loss needs, got \[\]; add it, if the engine can return it, give a feature this name in `learner.features`"),
        (["top_k_logprobs"], [], r"`rollout.outputs` must contain top_k, which the loss needs"),
        ([], ["brief"], r"`reward.scorers`: no scorer gives a reward called `brief`, which the loss term Part reads; known: exact; add a scorer with `reward: brief`"),
    )):  # fmt: skip
        (tmp_path / f"part{number}.py").write_text(PART.format(needs=needs, rewards=rewards))
        chosen = [f"learner.loss=[part{number}.py:Part]", "run.success_reward=exact"]
        assert re.search(expected, refused("check", str(path), *chosen))


def test_a_reference_model_that_does_not_fit_is_reported_before_the_run(tmp_path: Path, model: Path) -> None:
    path = config_file(
        tmp_path, f"model: {model}\nrun: {{eval_every: 0, success_reward: exact}}\nreward: {{scorers: [exact]}}\n"
    )
    other = tmp_path / "other"
    arguments = ("check", str(path), "recipe=grpo_kl", "learner.reference={kind: path, path: other}")
    assert re.search(
        rf"`learner.reference.path`: {other} does not contain a config.json; name a folder", refused(*arguments)
    )
    shutil.copytree(model, other)
    assert command(*arguments).exit_code == 0, "a path is relative to the configuration"
    config = json.loads((other / "config.json").read_text())
    for change, expected in (
        ({"vocab_size": 64}, r"`learner.reference`: the vocabulary of the reference has 64 tokens, that of the policy \d+; choose"),
        ({"model_type": "llama"}, "`learner.reference`: the architecture of the reference is llama, that of the policy .*; choose"),
        ({"model_type": "no_such_type"}, r"`learner.reference.path`: transformers cannot read the model in .*no_such_type"),
    ):  # fmt: skip
        (other / "config.json").write_text(json.dumps(config | change))
        assert re.search(expected, command(*arguments).stderr.replace("\n", " "))


def test_a_mistake_in_a_recipe_is_reported_with_its_file(tmp_path: Path, model: Path) -> None:
    """The user's file does not show the wrong value, so the message names the recipe and the line."""
    (tmp_path / "method.yaml").write_text(
        "about: {summary: A method}\n"
        "run: {group_size: 1}\n"
        "reward:\n"
        "  scorers: [{name: exakt, reward: correct}]\n"
        "  finalizers: [keep_al]\n"
        "data:\n"
        "  selector: {name: thompson, options: {targets: 0.5}}\n"
        "rollout:\n"
        "  agent: agent.py:Agent\n"
        "  samplings: {temperature: 0.7}\n"
        "learner:\n"
        "  estimator:\n"
        "    name: grpo\n"
        "    options:\n"
        "      epsilonn: 1\n"
        "  loss:\n"
        "    - {name: ppo_clip, options: {weight_max: 2.0}}\n"
    )
    path = config_file(tmp_path, f"recipe: method.yaml\nmodel: {model}\nrun: {{eval_every: 0}}\n")
    done = command("check", str(path))
    assert done.exit_code == 2
    for expected in (
        r"method.yaml:10: `rollout.samplings`: unknown key; did you mean `sampling`\?",
        r"method.yaml:4: `reward.scorers\[0\]`: there is no scorer `exakt`",
        r"method.yaml:5: `reward.finalizers\[0\]`: there is no finalizer `keep_al`",
        r"method.yaml:7: `data.selector`: options of selector `thompson`: .*`targets`: unknown key; did you mean `target`\?",
        r"method.yaml:9: `rollout.agent`: .*there is no file .*agent.py",
        r"method.yaml:15: `learner.estimator`: options of estimator `grpo`: `epsilonn`: unknown key; did you mean `epsilon`\?",
        r"method.yaml:17: `learner.loss\[0\]`: options of loss term `ppo_clip`: `weight_max`: unknown key",
    ):
        assert re.search(expected, done.stderr), (expected, done.stderr)
    assert done.stderr.startswith("error: 7 mistakes:"), done.stderr
    done = command(
        "check", str(path), "learner.estimator.options={}", "learner.loss=[{name: ppo_clip, options: {x: 1}}]"
    )
    assert "method.yaml:15" not in done.stderr
    assert re.search(r"\d\. `learner.loss\[0\]`: options of loss term `ppo_clip`: `x`: unknown key", done.stderr), (
        "the override gives this value, not the recipe"
    )


def test_missing_configuration_is_reported() -> None:
    assert re.search(
        r"nope.yaml: cannot read the configuration file: .*; check the path", refused("check", "nope.yaml")
    )


def test_missing_task_file_is_reported(tmp_path: Path, model: Path) -> None:
    path = config_file(tmp_path, f"model: {model}\n")
    (tmp_path / "tasks.jsonl").unlink()
    assert re.search(
        r"cannot read .*tasks.jsonl: No such file .*give the path of a JSONL file", refused("check", str(path))
    )


def test_malformed_task_line_is_reported_with_line_and_field(tmp_path: Path, model: Path) -> None:
    path = config_file(tmp_path, f"model: {model}\n")
    (tmp_path / "tasks.jsonl").write_text(TASKS + '{"question": "3+3"}\n')
    message = refused("check", str(path))
    assert re.search(r'tasks.jsonl:3: field "answer": is missing; the line has question', message)


def test_missing_model_is_reported(tmp_path: Path) -> None:
    path = config_file(tmp_path, "run: {eval_every: 0}\n")
    assert "`model`: name a folder with a model in transformers format, or give `made_model`" in refused(
        "check", str(path)
    )
    assert re.search(
        r"`model`: .*/gone does not contain a config.json; name a folder", refused("check", str(path), "model=gone")
    )


def test_model_that_does_not_load_is_reported(tmp_path: Path, model: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    path = config_file(tmp_path, "run: {eval_every: 0}\nmodel: broken\n")
    assert re.search(r"`model`: no model can be loaded from .*broken", refused("check", str(path)))


def test_train_refuses_before_it_makes_a_folder(tmp_path: Path) -> None:
    out = tmp_path / "run"
    refused("train", str(DEMO_CONFIG), "recipe=grpoo", "--out", str(out))
    assert not out.exists()


def test_train_does_not_overwrite_a_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.origin.write_bytes(msgspec.json.encode(ORIGIN))
    message = refused("demo", "--out", str(tmp_path))
    assert f"holds a run; resume it with `rollmesh train {tmp_path}`, or choose another --out" in message
    folder.origin.write_bytes(msgspec.json.encode(msgspec.structs.replace(ORIGIN, is_mesh=True)))
    assert f"holds a mesh; restart it with `rollmesh up {tmp_path}`" in refused("demo", "--out", str(tmp_path))


def test_audit_of_another_folder_is_refused(tmp_path: Path) -> None:
    assert "not the folder of a run" in refused("audit", str(tmp_path))


def test_audit_of_a_run_that_never_started_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {name: idle}\n")
    origin = {"command": [], "base_dir": "/", "started_at": "", "python": "", "platform": "", "packages": {}}
    (tmp_path / "run.json").write_text(json.dumps(origin))
    assert "the run was never started, so it has no streams" in refused("audit", str(tmp_path))

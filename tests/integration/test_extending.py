"""The extensions of docs/extending.md: the page contains each file, and each one works in its service."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec

from rollmesh.app.checks.config_checks import find_mistakes
from rollmesh.app.config import load_train_config
from rollmesh.services.data.config import DataConfig, build_engine, build_pools, build_selector
from rollmesh.services.data.selector import SELECTORS, GroupResult, Plan
from rollmesh.services.data.source import SOURCES
from rollmesh.services.data.task import Split
from rollmesh.services.reward.config import ScorerConfig
from rollmesh.services.reward.config import build_engine as build_reward_engine
from rollmesh.services.reward.finalizer import Group
from rollmesh.services.reward.item import AnswerKey, ScoreItem, TaskView
from rollmesh.services.rollout.agent import load_agent
from rollmesh.services.sandbox.node import SandboxNode
from rollmesh.shared.clients.sandbox import ExecOutcome, SandboxClient
from rollmesh.shared.clock import ManualClock, SystemClock
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import (
    EpisodeKey,
    MemberOutcome,
    Message,
    Outcome,
    Reward,
    Role,
    SampleSummary,
)
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.server import ServerConfig
from rollmesh.testing.memory_bus import MemoryBus
from rollmesh.testing.rollout import LocalMesh, lease

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "extending"
ACCESS = Access(token="t")
CONFIG = load_train_config(FOLDER / "config.yaml")


def test_the_page_contains_every_file_literally() -> None:
    page = (ROOT / "docs" / "extending.md").read_text("utf-8")
    blocks = re.findall(r"```\w+\n(.*?)```", page, re.DOTALL)
    for path in sorted(FOLDER.iterdir()):
        if path.suffix in (".py", ".yaml"):
            assert path.read_text("utf-8") in blocks, f"docs/extending.md must contain {path.name} as it is"


def test_check_accepts_the_configuration_with_all_of_them() -> None:
    assert find_mistakes(CONFIG, FOLDER) == []


# Each in its service --------------------------------------------------------------------------------------------------


async def test_source_provides_the_tasks_of_the_data_service(tmp_path: Path) -> None:
    (tmp_path / "tasks.csv").write_text("prompt,topic,split\nname a river,water,train\nname a hill,land,test\n")
    config = DataConfig(source=Extension(f"{FOLDER}/csv_source.py:CsvSource", {"path": "tasks.csv"}))
    engine = build_engine(config, bus=MemoryBus(), clock=ManualClock(), base_dir=tmp_path)
    ((_, task),) = await engine.tasks_in_order(split="test", first_draw=0, num=9)
    assert (task.messages[0].content, task.labels["topic"]) == ("name a hill", "land")
    await engine.close()


async def test_family_is_generated_demonstrated_and_scored(tmp_path: Path) -> None:
    pools = build_pools(CONFIG.data, FOLDER)
    assert {split: len(pool) for split, pool in pools.items()} == {"train": 64, "validation": 8, "test": 8}
    task = pools[Split.TEST].task(0)
    source = SOURCES.make(CONFIG.data.source, FOLDER, base_dir=FOLDER)
    ideal = source.demonstration(task.oracle_ref.removeprefix("reverse:")).answer
    assert task.messages[0].content == f"Reverse {ideal[::-1]}"
    reward = build_reward_engine(CONFIG.reward, FOLDER)
    wrong = "x" * len(ideal)
    found = await reward.score([scored(answer, reward.oracles.resolve(task.oracle_ref)) for answer in (ideal, wrong)])
    assert [[one.value for one in rewards] for rewards in found] == [[1.0], [0.0]]
    await reward.close()


async def test_scorer_is_configured_by_its_options() -> None:
    config = msgspec.structs.replace(CONFIG.reward, scorers=(ScorerConfig(name="close_text.py:CloseText"),))
    for engine, value in (
        (build_reward_engine(CONFIG.reward, FOLDER), 0.75),
        (build_reward_engine(config, FOLDER), 0.25),
    ):
        ((reward,),) = await engine.score([scored("ABcX", AnswerKey(answers=("abcd",)))])
        assert (reward.value, reward.outcome) == (value, Outcome.OK), reward


def test_finalizer_decides_on_groups() -> None:
    engine = build_reward_engine(CONFIG.reward, FOLDER)
    for values, reason in (((0.0, 0.05), "SPREAD_TOO_SMALL"), ((0.0, 0.2), "")):
        members = tuple(
            MemberOutcome(sample_id=str(n), rewards=(Reward(name="correct", value=value),), end="ready")
            for n, value in enumerate(values)
        )
        assert engine.finalize(Group(group="g", task=TaskView(task_id="t"), members=members)).reason == reason


def test_finalizer_drops_members_that_loop_before_the_next_one_sees_the_group() -> None:
    engine = build_reward_engine(CONFIG.reward, FOLDER)
    texts = ("So it is 4. " * 20, "So it is 5.", "It is 4, because 2+2 is 4.")
    members = tuple(
        MemberOutcome(
            sample_id=str(n),
            rewards=(Reward(name="correct", value=value),),
            end="ready",
            summary=SampleSummary(text=text[-CONFIG.rollout.summary_text_chars :]),
        )
        for n, (text, value) in enumerate(zip(texts, (0.0, 0.5, 0.55), strict=True))
    )
    verdict = engine.finalize(Group(group="g", task=TaskView(task_id="t"), members=members))
    assert verdict.dropped == {"0": "LOOP"}
    assert verdict.reason == "SPREAD_TOO_SMALL", "of the two that are left"


def test_selector_draws_by_results_and_restores_its_state() -> None:
    pool = build_pools(CONFIG.data, FOLDER)[Split.TRAIN]
    selector = build_selector(CONFIG.data, pool, FOLDER)
    assert [selector.draw(0, frozenset()), selector.draw(1, frozenset({0}))] == [0, 1], "tasks without results first"
    for position in range(len(pool)):
        rate = {3: 0.75, 5: 1.0}.get(position, 0.25)
        selector.observe(GroupResult(position=position, successes=4 * rate, failures=4 - 4 * rate))
    restored = build_selector(CONFIG.data, pool, FOLDER)
    restored.restore(selector.snapshot())
    for each in (selector, restored):
        assert [each.draw(9, frozenset()), each.draw(9, frozenset({3}))] == [3, 0], "5 is solved in every attempt"


def test_selector_plans_a_larger_group_for_a_task_that_was_never_solved() -> None:
    pool = build_pools(CONFIG.data, FOLDER)[Split.TRAIN]
    chosen = Extension("wider_if_unsolved.py:WiderIfUnsolved", {"hot": 2})
    selector = SELECTORS.make(chosen, FOLDER, pool=pool, seed=0)
    for position, successes in ((0, 0.0), (1, 1.0)):
        selector.observe(GroupResult(position=position, successes=successes, failures=4.0))
    restored = SELECTORS.make(chosen, FOLDER, pool=pool, seed=0)
    restored.restore(selector.snapshot())
    for each in (selector, restored):
        wide, *others = (each.plan(9, position, frozenset()) for position in range(3))
        assert [(one.name, one.count, one.sampling.temperature) for one in wide.variants] == [
            ("plain", 4, None),
            ("hot", 2, 1.2),
        ]
        assert others == [Plan(propensity=1 / 64)] * 2


async def test_agent_asks_for_a_second_answer() -> None:
    mesh = LocalMesh(script=lambda text: f"answer {text.count('Are you sure?') + 1}<|end|>")
    await mesh.runner(load_agent(CONFIG.rollout.agent, FOLDER)).run(lease())
    (episode,) = mesh.samples.episodes
    said = [mesh.tokenizer.decode(s.token_ids) for s in episode.segments if s.role is Role.ACTION]
    assert said == ["answer 1<|end|>", "answer 2<|end|>"]


async def test_engine_language_and_backend_serve_sessions(tmp_path: Path) -> None:
    (tmp_path / "tea.txt").write_text("Green tea needs water of 80 degrees.")
    (tmp_path / "oven.txt").write_text("Bread needs 230 degrees.")
    overrides = [f"sandbox.egress.notes.retrieval.backend.options.directory={tmp_path}"]
    config = load_train_config(FOLDER / "config.yaml", overrides).sandbox.located(FOLDER)
    node = SandboxNode(
        config, node_id="a", access=ACCESS, state_dir=tmp_path / "state", server=ServerConfig(stop_s=0.0)
    )
    async with node:
        client = SandboxClient(lambda: [node.address], lambda at: open_channel(at, access=ACCESS), SystemClock())
        try:
            async with client.session("python", session_id="a") as session:
                ran = await session.run("print scalar reverse <STDIN>", language="perl", stdin=b"stressed")
                assert (ran.outcome, ran.stdout) == (ExecOutcome.OK, "desserts"), ran
                look = await session.run(f"print -e '{FOLDER}' ? 'host' : 'jail'", language="perl")
                assert look.stdout == "jail", "a user's language runs in the jail"
            async with client.session("notes", session_id="b") as session:
                found = await session.call("search", "green tea")
                assert found.result.startswith("[1] tea.txt\nid: tea.txt\n"), found
                assert "230" in (await session.call("retrieve", "oven.txt")).result
        finally:
            await client.close()
    lines = (tmp_path / "state" / "programs.jsonl").read_text().splitlines()
    assert [json.loads(line)["outcome"] for line in lines] == ["OK", "OK"]


def scored(answer: str, key: AnswerKey | None) -> ScoreItem:
    return ScoreItem(
        key=EpisodeKey(run="r", task="t", group="g", episode="g.0"),
        task=TaskView(task_id="t"),
        answer_key=key,
        messages=(Message(role="assistant", content=answer),),
        sample_id="s",
    )

"""Hidden tests as rewards: reward service, sandbox nodes and jails, over gRPC."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollmesh.services.reward.config import RewardConfig, build_engine
from rollmesh.services.reward.item import AnswerKey, ScoreItem, TaskView
from rollmesh.services.reward.node import RewardNode
from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.services.sandbox.node import SandboxNode
from rollmesh.shared.clients.sandbox import SandboxClient, SandboxClientConfig
from rollmesh.shared.clock import SystemClock
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.domain.trajectory import EpisodeKey, Message, Outcome, Reward
from rollmesh.shared.errors import Overloaded, UnknownOracle
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel

ACCESS = Access(token="t")
MANIFEST: dict[str, Any] = {
    "kind": "function",
    "function": "f",
    "tests": [{"arguments": [n], "expected": n * n} for n in range(4)],
}
SQUARE = "def f(x):\n    return x * x"


@asynccontextmanager
async def sandbox(state_dir: Path, **changes: Any) -> AsyncIterator[SandboxNode]:
    async with SandboxNode(
        SandboxConfig(**changes), node_id=state_dir.name, access=ACCESS, state_dir=state_dir
    ) as node:
        yield node


def client(*addresses: str, **changes: Any) -> SandboxClient:
    def connect(address: str) -> Any:
        return open_channel(address, access=ACCESS)

    return SandboxClient(lambda: addresses, connect, SystemClock(), SandboxClientConfig(**changes))


def item(node: RewardNode, oracle_ref: str, said: str) -> ScoreItem:
    return ScoreItem(
        key=EpisodeKey(run="r", task="t", group="g", episode="e"),
        task=TaskView(task_id="t"),
        answer_key=node.engine.oracles.resolve(oracle_ref),
        messages=(Message(role="assistant", content=said),),
        sample_id="s",
    )


def tasks_file(folder: Path) -> str:
    """Write one task per line with its manifest or reference. Return the digest of the file."""
    lines = [{"prompt": "square", "tests": MANIFEST}, {"prompt": "square", "tests": "square"}]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return hashlib.sha256((folder / "tasks.jsonl").read_bytes()).hexdigest()[:12]


@asynccontextmanager
async def reward_node(
    tmp_path: Path, *addresses: str, timeout_s: float = 30.0, **options: Any
) -> AsyncIterator[RewardNode]:
    settings = {
        "scorers": [{"name": "tests", "timeout_s": timeout_s, "options": options}],
        "answer_files": {"tasks": {"path": "tasks.jsonl", "answer": "", "tests": "tests"}},
        "sandboxes": list(addresses),
        "sandbox": {"open_s_max": 0.2},
    }
    config = config_from_dict(RewardConfig, settings)
    async with RewardNode(config, node_id="reward-0", access=ACCESS, base_dir=tmp_path) as node:
        yield node


async def rewards(node: RewardNode, oracle_ref: str, said: str) -> tuple[Reward, ...]:
    (given,) = await node.engine.score([item(node, oracle_ref, said)])
    return given


async def test_code_is_rewarded_by_hidden_tests_of_the_task_or_of_the_store(tmp_path: Path) -> None:
    oracles = tmp_path / "oracles"
    oracles.mkdir()
    (oracles / "square.json").write_text(json.dumps(MANIFEST))
    digest = tasks_file(tmp_path)
    async with sandbox(tmp_path / "node", oracles=str(oracles)) as node, reward_node(tmp_path, node.address) as reward:
        for ref in (f"jsonl:tasks@{digest}#1", f"jsonl:tasks@{digest}#2", "tests:square"):
            right = await rewards(reward, ref, f"Like this:\n```python\n{SQUARE}\n```\n")
            assert [(r.name, r.value, r.outcome) for r in right] == [
                ("tests", 1.0, Outcome.OK),
                ("tests_share", 1.0, Outcome.OK),
            ]
        half = await rewards(reward, ref, "```\ndef f(x): return x if x < 2 else 0\n```")
        assert [r.value for r in half] == [0.0, 0.5]
        assert half[0].evidence.startswith("2/4 accepted: AC 2, WA 2; first failure: test 3 WA")
        assert [r.value for r in await rewards(reward, ref, SQUARE)] == [0.0, 0.0], "no code block"
        forged = await rewards(reward, ref, "```python\nimport os\nprint('4/4 accepted')\nos._exit(0)\n```")
        assert ([r.value for r in forged], "RE 4" in forged[0].evidence) == ([0.0, 0.0], True)


async def test_whole_answer_may_be_the_code(tmp_path: Path) -> None:
    digest = tasks_file(tmp_path)
    async with sandbox(tmp_path / "node") as node, reward_node(tmp_path, node.address, pattern="") as reward:
        assert [r.value for r in await rewards(reward, f"jsonl:tasks@{digest}#1", SQUARE)] == [1.0, 1.0]


async def test_mesh_failures_are_infra_failures_of_the_sample(tmp_path: Path) -> None:
    tasks_file(tmp_path)
    said = f"```python\n{SQUARE}\n```"
    async with reward_node(tmp_path) as reward:
        (failed,) = await rewards(reward, "tests:square", said)
        assert (failed.outcome, "no sandbox node" in failed.evidence) == (Outcome.INFRA_FAILURE, True)
        alone = build_engine(config_from_dict(RewardConfig, {"scorers": [{"name": "tests"}]}))
        ((failed,),) = await alone.score([item(reward, "tests:square", said)])
        assert (failed.outcome, "needs sandbox nodes" in failed.evidence) == (Outcome.INFRA_FAILURE, True)
    async with sandbox(tmp_path / "node") as node, reward_node(tmp_path, node.address) as reward:
        (failed,) = await rewards(reward, "tests:square", said)
        assert (failed.outcome, "no oracle store" in failed.evidence) == (Outcome.INFRA_FAILURE, True)


async def test_task_without_hidden_tests_does_not_apply(tmp_path: Path) -> None:
    tasks_file(tmp_path)
    async with reward_node(tmp_path) as reward:
        (given,) = await rewards(reward, "calc:1+1", "2")
        assert given.outcome is Outcome.NOT_APPLICABLE


async def test_client_judges_on_another_node_when_one_has_no_place(tmp_path: Path) -> None:
    files, manifest = {"solution.py": SQUARE.encode()}, json.dumps(MANIFEST)
    async with AsyncExitStack() as stack:
        full = await stack.enter_async_context(sandbox(tmp_path / "full", sessions_max=1))
        free = await stack.enter_async_context(sandbox(tmp_path / "free"))
        await full.core.sessions.open("s", profile="python", limits={}, ttl_s=0, owner="another")
        both, only = client(full.address, free.address), client(full.address, open_s_max=0.1)
        for opened in (both, only):
            stack.push_async_callback(opened.close)
        report = await both.run_tests(files, manifest=manifest, limits={"wall_s": 1.0})
        assert (report.accepted, report.num_tests, report.accepted_share) == (True, 4, 1.0)
        assert free.core.sessions.counts().created == 4
        with pytest.raises(Overloaded):
            await only.run_tests(files, manifest=manifest)
        with pytest.raises(UnknownOracle):
            await both.run_tests(files, oracle_ref="square")
        assert (both.num_sessions, only.num_sessions) == (0, 0)


@asynccontextmanager
async def bounded_scorer(tmp_path: Path, timeout_s: float, **changes: Any) -> AsyncIterator[RewardNode]:
    """Run a reward node whose scorer `tests` has a time limit, with a sandbox node for it."""
    tasks_file(tmp_path)
    config = config_from_dict(SandboxConfig, {"grace_s": 0.1, **changes})
    async with (
        SandboxNode(config, node_id="sandbox-0", access=ACCESS, state_dir=tmp_path / "node") as node,
        reward_node(tmp_path, node.address, timeout_s=timeout_s) as reward,
    ):
        yield reward


def judged_item(manifest: dict[str, Any], source: str) -> ScoreItem:
    return ScoreItem(
        key=EpisodeKey(run="r", task="t", group="g", episode="e"),
        task=TaskView(task_id="t"),
        answer_key=AnswerKey(tests=manifest),
        messages=(Message(role="assistant", content=f"```python\n{source}\n```"),),
        sample_id="s",
    )


CALLS: dict[str, Any] = {
    "kind": "function",
    "function": "f",
    "tests": [{"arguments": [], "expected": 1} for _ in range(5)],
}
PROGRAM: dict[str, Any] = {"kind": "stdio", "tests": [{"stdin": "", "stdout": "1"} for _ in range(5)]}
CHECKED: dict[str, Any] = {
    "compare": "checker",
    "checker": {"source": "import time\ndef check(*_):\n    time.sleep(9)\n    return False"},
}
RESISTING = """
import signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
def f(): time.sleep(60)
"""
SLOW: dict[str, tuple[dict[str, Any], str, str]] = {
    "quick and wrong": (CALLS, "def f(): return 2", "WA 5"),
    "an endless loop": (CALLS | {"limits": {"wall_s": 0.3}}, "def f():\n    while True: pass", "TLE 5"),
    "an endless loop, beyond the limits of all tests": (CALLS | {"time_limits_max": 5}, "import time\ndef f(): time.sleep(60)", "TLE 5"),
    "signals are blocked": (CALLS | {"limits": {"wall_s": 0.3}}, RESISTING, "TLE 5"),
    "a program that is slow and wrong": (PROGRAM, "import time\ntime.sleep(0.8)\nprint(2)", "TLE"),
    "slow and wrong, but within the limit of each test": (CALLS | {"limits": {"wall_s": 0.5}}, "import time\ndef f():\n    time.sleep(0.4)\n    return 2", "TLE"),
    "never loads": (CALLS, "while True: pass", "TLE 5"),
    "an answer that the checker rejects slowly": (CALLS | CHECKED, "def f(): return 2", "TLE"),
    "an answer on which the hidden test runs slowly": (
        {"kind": "unit", "source": "import solution\n" + "".join(f"def test_{n}():\n    for _ in range(solution.f()): pass\n" for n in range(5))},
        "def f(): return 10 ** 12",
        "TLE",
    ),
}  # fmt: skip


async def test_a_slow_wrong_answer_is_a_zero(tmp_path: Path) -> None:
    profiles = {"python": {"limits": {"call_s": 1.0}}}
    async with bounded_scorer(tmp_path, timeout_s=1.0, profiles=profiles) as reward:
        given = await reward.engine.score([judged_item(manifest, source) for manifest, source, _ in SLOW.values()])
    for (name, (_, _, verdicts)), rewards_given in zip(SLOW.items(), given, strict=True):
        assert [(r.value, r.outcome) for r in rewards_given] == [(0.0, Outcome.OK)] * 2, (name, rewards_given)
        assert verdicts in rewards_given[0].evidence, (name, rewards_given)


async def test_only_time_that_the_candidate_took_counts(tmp_path: Path) -> None:
    slow, right = "import time\ndef f(): time.sleep(60)", "def f(): return 1"
    async with bounded_scorer(tmp_path, timeout_s=1.0, judgments_inflight_max=1) as reward:
        given = await asyncio.gather(*(reward.engine.score([judged_item(CALLS, c)]) for c in (slow, slow, right)))
        assert [[(r.value, r.outcome) for r in rewards_given] for ((*rewards_given,),) in given] == [
            [(value, Outcome.OK)] * 2 for value in (0.0, 0.0, 1.0)
        ], "the second and the third waited for longer than timeout_s"

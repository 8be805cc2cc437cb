"""A run with a graph of scorers, rewards of the environment, rewards asked for in the episode and dropped members is
killed and resumed, and decides what an uninterrupted run decides."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from rollmesh.services.coordinator.core import facts as f

from .test_cli import CONFIG, _audited, _facts, _train, _until_updates, save_user_folder

UPDATES = 8
AGENT = """
class Agent:
    async def run(self, task, env):
        await env.generate(max_tokens=4)
        env.reward("asked", (await env.score("correct"))["correct"] or 0.0)
"""
SCORER = """
from rollmesh.services.reward.finalizer import Finalizer, FinalizerDecision, Verdict
from rollmesh.services.reward.scorer import Scorer


class Parity(Scorer):
    async def score(self, item):
        return float(sum(map(ord, item.response())) % 2)


class Compared(Scorer):
    reads = ("correct", "asked")

    async def score(self, item):
        return (item.reward("correct") + item.reward("asked")) / 2


class DropsLast(Finalizer):
    def decide(self, group):
        worst = min(group.members, key=lambda member: (member.rewards[0].value, member.sample_id))
        return Verdict(decision=FinalizerDecision.KEEP, dropped={worst.sample_id: "WORST"})
"""
REWARD = """
reward:
  scorers:
    - {name: "scorer.py:Compared", reward: compared}
    - {name: "scorer.py:Parity", reward: correct}
    - {name: environment, reward: asked, options: {min: 0, max: 1}}
  weights: {compared: 1.0}
  finalizers: ["scorer.py:DropsLast", zero_variance]
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    folder = save_user_folder(tmp_path)
    (folder / "agent.py").write_text(AGENT)
    (folder / "scorer.py").write_text(SCORER)
    lines = [line for line in CONFIG.splitlines() if not line.startswith("reward:")]
    (folder / "mine.yaml").write_text("\n".join(lines) + REWARD)
    return folder


def decisions(facts: list[f.Fact]) -> dict[str, Any]:
    """Return what was decided on each group, and the samples of each update, whose order in a batch is that of their
    ends."""
    found: dict[str, Any] = {}
    for fact in facts:
        match fact:
            case f.GroupReserved():
                found[f"{fact.group} task"] = fact.task.task_id
            case f.EpisodeScored():
                found[f"{fact.episode} rewards"] = {
                    s.sample_id: {(r.name, r.value, r.evidence) for r in s.rewards} for s in fact.samples
                }
            case f.SamplesEnded(end=f.SampleEnd.FILTERED):
                found[f"{fact.group} {fact.reason}"] = fact.sample_ids
            case f.GroupFinalized():
                found[f"{fact.group} verdict"] = (fact.decision, fact.reason, len(fact.members))
            case f.UpdateCommitted():
                found[f"update {fact.update}"] = (frozenset(fact.used), fact.digest)
            case _:
                pass
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_was_killed_decides_what_an_uninterrupted_one_decides(mine: Path) -> None:
    changes = ("run.max_staleness=0", "run.eval_every=0", "learner.checkpoint_every=1")
    started = ("train", "--in-process", str(mine / "mine.yaml"), *changes, "run.updates_max=2000")
    asyncio.run(_until_updates(3, signal.SIGKILL, *started, "--out", str(mine / "killed")))
    resumed = _train("--resume", str(mine / "killed"), f"run.updates_max={UPDATES}", "--json")
    assert resumed.exit_code == 0, resumed.output
    whole = _train(str(mine / "mine.yaml"), *changes, f"run.updates_max={UPDATES}", "--out", str(mine / "whole"))
    assert whole.exit_code == 0, whole.output

    assert _audited(mine / "killed")["holds"]
    assert _audited(mine / "whole")["holds"]
    facts = [asyncio.run(_facts(mine / name)) for name in ("killed", "whole")]
    killed, uninterrupted = map(decisions, facts)
    kinds = {name.split()[-1] for name in uninterrupted}
    assert kinds >= {"WORST", "verdict", "rewards", "task"}
    assert killed == uninterrupted

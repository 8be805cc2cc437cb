"""Failed attempts are counted, reported with the newest cause and traceback, and stored in the dead letter."""

from __future__ import annotations

from dataclasses import replace

from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.decision_context import RECENT_MAX, DeadLetter, ScoredEpisode
from rollmesh.services.coordinator.core.facts import GroupDecision
from rollmesh.services.coordinator.core.state import GroupPhase
from rollmesh.services.coordinator.run_state import run_state
from rollmesh.services.coordinator.translate import TRACEBACK_CHARS_MAX, dead_letter, episode_report
from rollmesh.shared.domain.ledger_head import LedgerHead
from rollmesh.v1 import coordinator_pb2, run_pb2, types_pb2

from .core_run import CoreRun

HEAD = LedgerHead()


def fail(run: CoreRun, cause: str, num: int = 1) -> list[DeadLetter]:
    """Lease and fail `num` episodes. Return their dead letters."""
    acquired: i.Acquired = run.ask(i.AcquireRollouts, node_id="w", num_max=num, wait_s=1.0)
    reports = tuple(
        i.EpisodeReport(
            lease_id=lease.lease_id,
            group=lease.group,
            episode=lease.episode,
            attempt=lease.attempt,
            outcome=m.EpisodeOutcome.INFRA_FAILURE,
            cause=cause,
            traceback="line 7",
        )
        for lease in acquired.leases
    )
    decision = run.core.handle(i.ReportEpisodes(ticket=0, node_id="w", reports=reports), run.now)
    run.take(decision)
    return [effect for effect in decision.effects if isinstance(effect, DeadLetter)]


def reported(run: CoreRun) -> run_pb2.FailedAttempts:
    return run_state(run.core, HEAD).failed_attempts


def test_failures_of_one_kind_make_a_row_that_a_scored_episode_ends() -> None:
    run = CoreRun(tries_max=9)
    run.begin()
    assert not run_state(run.core, HEAD).HasField("failed_attempts")
    fail(run, "scorer correct: KeyError: 'a'")
    fail(run, "scorer correct: KeyError: 'b'")
    assert (reported(run).num, reported(run).num_alike, reported(run).cause) == (2, 2, "scorer correct: KeyError: 'b'")
    assert reported(run).traceback == "line 7"
    fail(run, "agent: KeyError: 'b'")
    assert (reported(run).num, reported(run).num_alike) == (3, 1)
    run.generate(1, step=0)
    assert (reported(run).num, reported(run).num_alike) == (3, 0)


def test_an_attempt_without_a_serving_node_uses_up_no_try() -> None:
    run = CoreRun(tries_max=2)
    run.begin()
    acquired: i.Acquired = run.ask(i.AcquireRollouts, node_id="w", num_max=1, wait_s=1.0)
    for _ in range(5):
        (lease,) = acquired.leases
        message = coordinator_pb2.EpisodeReport(
            lease_id=f"run/{lease.lease_id}",
            key=types_pb2.EpisodeKey(run="run", group=lease.group, episode=lease.episode, attempt=lease.attempt),
            outcome=coordinator_pb2.EPISODE_OUTCOME_INFRA_FAILURE,
            failure=types_pb2.Failure(reason="NO_NODE", message="scorer: no reward node has joined"),
        )
        report = replace(episode_report(message), lease_id=lease.lease_id)
        run.take(run.core.handle(i.ReportEpisodes(ticket=0, node_id="w", reports=(report,)), run.now))
        acquired = run.ask(i.AcquireRollouts, node_id="w", num_max=1, wait_s=1.0)
    assert acquired.leases[0].episode == lease.episode
    assert acquired.leases[0].attempt == 6
    assert (reported(run).num, reported(run).cause) == (5, "scorer: no reward node has joined")


def test_a_dead_letter_keeps_the_traceback() -> None:
    run = CoreRun(tries_max=1)
    run.begin()
    (letter,) = fail(run, "agent: ValueError: x")
    assert dead_letter(letter, 0.0).traceback == "line 7"


def test_a_report_brings_the_end_of_a_long_traceback() -> None:
    failure = types_pb2.Failure(message="agent: ValueError", metadata={"traceback": "a" * TRACEBACK_CHARS_MAX + "end"})
    message = coordinator_pb2.EpisodeReport(
        key=types_pb2.EpisodeKey(run="r", group="g", episode="e", attempt=1),
        outcome=coordinator_pb2.EPISODE_OUTCOME_INFRA_FAILURE,
        failure=failure,
    )
    report = episode_report(message)
    assert len(report.traceback) == TRACEBACK_CHARS_MAX
    assert report.traceback.endswith("end")


def test_only_sampled_tokens_count_as_generated() -> None:
    run = CoreRun()
    run.begin()
    run.generate(2, step=0)  # 2 samples of 8 tokens, of which 4 were sampled
    assert run_state(run.core, HEAD).policies[0].tokens_generated == 8


def test_groups_without_a_decision_are_counted_by_samples_until_a_decision_succeeds() -> None:
    run = CoreRun()
    run.begin()
    run.generate(2 * run.core.state.the_spec.group_size, step=0)
    first, second = [g for g in run.core.state.groups.values() if g.samples]
    num = len(first.samples)
    first.phase = second.phase = GroupPhase.FINALIZING
    failed = i.FinalizeFailed(group=first.group, cause="estimator e.py:E: KeyError: 'a'", traceback="line 7")
    (letter,) = [e for e in run.core.handle(failed, run.now).effects if isinstance(e, DeadLetter)]
    assert letter.traceback == "line 7"
    assert (reported(run).num_undecided, reported(run).traceback) == (num, "line 7")
    run.core.handle(i.GroupDecided(group=second.group, decision=GroupDecision.KEEP), run.now)
    assert reported(run).num_undecided == 0


def test_the_newest_scored_episodes_are_summarized_with_their_tool_calls() -> None:
    run = CoreRun()
    run.begin()
    assert not run_state(run.core, HEAD).HasField("recent")
    run.generate(1, step=0)
    recent = run_state(run.core, HEAD).recent
    assert recent.num_samples > 0
    assert list(recent.mean_rewards) == ["correct"]
    run.core.ephemeral.recent.extend(
        [ScoredEpisode((("correct", 1.0), ("short", 0.5)), (6, 2), 3, 2, "g7.0.1")] * RECENT_MAX
    )
    recent = run_state(run.core, HEAD).recent
    assert (recent.num_samples, recent.mean_sampled_tokens) == (2 * RECENT_MAX, 4.0)
    assert dict(recent.mean_rewards) == {"correct": 1.0, "short": 0.5}
    assert (recent.num_tool_calls, recent.num_tool_calls_failed) == (3 * RECENT_MAX, 2 * RECENT_MAX)
    assert recent.newest_sample_id == "g7.0.1"

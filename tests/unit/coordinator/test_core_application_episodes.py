"""Episodes of applications in the core: how they are found, and how their ends are kept after their groups are gone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rollmesh.services.coordinator import validation
from rollmesh.services.coordinator.core import application_episodes as episodes
from rollmesh.services.coordinator.core import group_changes
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.core import Core
from rollmesh.services.coordinator.core.facts import PayloadRef, Reward, RewardOutcome, SampleMeta, StepSpan
from rollmesh.services.coordinator.mesh_description import MeshDescriber, MeshDescription
from rollmesh.shared.errors import EpisodeConflict, EpisodeLost, EpisodesNotServed, MeshError, UnknownEpisode
from rollmesh.v1 import coordinator_pb2, types_pb2

from .core_run import CoreRun
from .test_core_submissions import begun, submit, task

COMPLETED = m.EpisodeOutcome.COMPLETED


def leased(*keys: str, **spec: Any) -> tuple[CoreRun, list[i.EpisodeLease]]:
    """Submit tasks, and lease their episodes."""
    run = begun(**({"group_size": 1} | spec))
    submit(run, *map(task, keys))
    acquired: i.Acquired = run.ask(i.AcquireRollouts, node_id="w", num_max=8, wait_s=0.0)
    return run, list(acquired.leases)


def report(run: CoreRun, lease: i.EpisodeLease, rewards: Mapping[str, float] | None = None, **fields: Any) -> None:
    """Report an episode, with a sample if it has rewards."""
    span = StepSpan(step=0, incarnation=0, num_tokens=4)
    given = tuple(
        Reward(name=name, value=value, segment=-1, scorer="environment@1", outcome=RewardOutcome.OK)
        for name, value in (rewards or {}).items()
    )
    sample = SampleMeta(
        sample_id=f"{lease.episode}-0", policy="main", steps=(span,), num_tokens=8, num_sampled_tokens=4, rewards=given
    )
    values: dict[str, Any] = {"outcome": COMPLETED, "payload": PayloadRef(sequence=1, size_bytes=1)} | fields
    one = i.EpisodeReport(
        lease_id=lease.lease_id,
        group=lease.group,
        episode=lease.episode,
        attempt=lease.attempt,
        **values,
        samples=(sample,) if rewards else (),
    )
    assert run.ask(i.ReportEpisodes, node_id="w", reports=(one,)).results == ("",)


def ended(run: CoreRun, lease: i.EpisodeLease, rewards: Mapping[str, float]) -> tuple[str, ...]:
    """Return the answer to FinishEpisode for an ended episode."""
    result = episodes.result_of(run.core.state, lease.lease_id)
    assert result is not None
    return episodes.check_result(result, rewards)


def test_the_end_of_a_scored_episode_is_known_after_its_samples_are_trained() -> None:
    run, (lease, other) = leased("a", "b")
    assert episodes.lease_of(run.core.state, "a", 0) == lease.lease_id
    assert episodes.result_of(run.core.state, lease.lease_id) is None
    for one in (lease, other):
        report(run, one, {"liked": 0.5})
    run.commit(1, run.lease(1).lease_id)
    run.checkpoint(1, run.core.state.the_clock.digest)
    assert not run.core.state.groups
    recovered = Core()
    recovered.replay(run.facts)
    assert recovered.state == run.core.state
    assert ended(run, lease, {"liked": 0.5}) == (f"{lease.episode}-0",)
    for other_rewards in ({"liked": 0.4}, {}):
        with pytest.raises(EpisodeConflict):
            ended(run, lease, other_rewards)


def test_an_episode_without_samples_ends_with_the_reason_of_its_report() -> None:
    run, (lease, plain) = leased("a", "b")
    report(run, lease, reason="REWARD_LATE")
    report(run, plain)
    assert run.core.state.counters.reasons == {"filtered/REWARD_LATE": 1, "filtered/NO_SAMPLES": 1}
    assert run.core.state.counters.conserved
    with pytest.raises(MeshError, match="EPISODE_OVER|filtered/REWARD_LATE") as over:
        ended(run, lease, {"liked": 1.0})
    assert over.value.metadata["end"] == "filtered/REWARD_LATE"


def test_a_lost_attempt_is_not_the_next_one() -> None:
    run, (lease,) = leased("a")
    report(run, lease, outcome=m.EpisodeOutcome.INFRA_FAILURE, cause="engine: gone")
    assert episodes.lease_of(run.core.state, "a", 0) == ""
    with pytest.raises(EpisodeLost, match="engine: gone"):
        episodes.result_of(run.core.state, lease.lease_id)
    acquired: i.Acquired = run.ask(i.AcquireRollouts, node_id="w", num_max=1, wait_s=0.0)
    (again,) = acquired.leases
    assert again.lease_id != lease.lease_id
    assert episodes.result_of(run.core.state, again.lease_id) is None
    report(run, again, {"liked": 1.0})
    with pytest.raises(EpisodeLost):
        episodes.result_of(run.core.state, lease.lease_id)


@pytest.mark.parametrize(
    "lease_id", ["", "g0.0", "g0.0#2", "g0.0#x", "g0.1#1", "g7.0#1", "#", "g0.0#99999999999999999999"]
)
def test_a_lease_that_never_was_is_unknown(lease_id: str) -> None:
    run, _ = leased("a")
    with pytest.raises(UnknownEpisode):
        episodes.result_of(run.core.state, lease_id)


def test_the_oldest_ends_are_forgotten_and_a_run_of_the_data_service_keeps_none(monkeypatch: Any) -> None:
    monkeypatch.setattr(group_changes, "RESULTS_KEPT_MAX", 2)
    run, leases = leased("a", "b", "c")
    for lease in leases:
        report(run, lease, reason="DISCARDED")
    assert list(run.core.state.episode_results) == [lease.episode for lease in leases[1:]]
    with pytest.raises(UnknownEpisode):
        episodes.result_of(run.core.state, leases[0].lease_id)
    other = CoreRun()
    other.begin()
    other.generate(4, step=0)
    assert not other.core.state.episode_results


@pytest.mark.parametrize(("reason", "valid"), [("", True), ("REWARD_LATE", True), ("two words", False)])
def test_the_reason_of_a_report_without_samples_is_a_word(reason: str, valid: bool) -> None:
    failure = types_pb2.Failure(reason=reason)
    completed = coordinator_pb2.EPISODE_OUTCOME_COMPLETED
    message = coordinator_pb2.EpisodeReport(outcome=completed, failure=failure)
    assert (not validation.why_invalid_report(message)) is valid


def test_an_episode_gets_an_agent_that_serves_applications() -> None:
    def describer(*agents: str) -> MeshDescriber:
        offer = MeshDescription(
            config_yaml="", coordinator="", bus_url="", policy="main", base_dir="", application_agents=agents
        )
        nothing: Any = None
        return MeshDescriber(offer, nothing, nothing)

    assert describer("", "live").application_agent("") == ""
    assert describer("live", "other").application_agent("") == "live"
    assert describer("live", "other").application_agent("other") == "other"
    for known, name in (((), ""), (("live",), "solver")):
        with pytest.raises(EpisodesNotServed):
            describer(*known).application_agent(name)

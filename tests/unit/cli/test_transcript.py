"""A sample as text: each message has its tokens, and text of a model is never interpreted as markup."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from rollmesh.app.samples.samples import ChainsLine, MessageLine, RewardLine, SampleLine, SegmentLine, VersionLine
from rollmesh.app.samples.transcript import transcript, turns_of


def given(num: int, role: str = "context", source: str = "prompt") -> SegmentLine:
    return SegmentLine(role=role, source=source, token_ids=[1] * num)


def sampled(num: int, *, step: int = 0, finish: str = "stop") -> SegmentLine:
    version = VersionLine(policy="main", step=step)
    return SegmentLine(
        role="action", source="policy", token_ids=[2] * num, logprobs=[-0.5] * num, version=version, finish=finish
    )


def shown(**fields: Any) -> str:
    values: dict[str, Any] = {"sample_id": "g0.0-0", "run": "r", "task": "t", "group": "g0", "episode": "g0.0"}
    console = Console(width=100, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as captured:
        console.print(transcript(SampleLine(**(values | fields))))
    return captured.get()


def test_a_generation_that_several_weights_sampled_is_one_turn() -> None:
    path = [
        given(3),
        sampled(2, step=4, finish="unfinished"),
        sampled(5, step=5),
        given(2, "observation", "tool"),
        sampled(1),
    ]
    turns = turns_of(path)
    assert [turn.num_tokens for turn in turns] == [7, 1]
    assert turns[0].describe() == "7 tokens, main@4.0, main@5.0, mean log-prob -0.50, stop"


def test_a_turn_that_was_cut_off_is_a_turn() -> None:
    assert [turn.num_tokens for turn in turns_of([given(3), sampled(2, finish="unfinished")])] == [2]


def test_turns_stand_at_the_messages_that_were_generated_not_at_those_of_the_prompt() -> None:
    messages = [
        MessageLine(role="user", content="2+2?"),
        MessageLine(role="assistant", content="4"),
        MessageLine(role="user", content="3+3?"),
        MessageLine(role="assistant", content="6"),
    ]
    lines = shown(messages=messages, segments=[given(9), sampled(2)]).splitlines()
    notes = [line for line in lines if "assistant" in line]
    assert "tokens" not in notes[0]
    assert "2 tokens, main@0.0" in notes[1]


def test_the_title_has_the_labels_and_the_agent_of_the_task() -> None:
    assert "g0.0-0  t level=3, agent solver" in shown(labels={"level": "3"}, agent="solver")
    assert "agent" not in shown(labels={"level": "3"})


def test_what_a_model_wrote_is_no_markup() -> None:
    text = shown(messages=[MessageLine(role="assistant", content="[bold]x[/bold] [/] [red")], segments=[sampled(3)])
    assert "[bold]x[/bold] [/] [red" in text


def test_a_reward_shows_its_evidence_and_a_failure_is_no_value() -> None:
    rewards = [
        RewardLine(name="correct", value=1.0, scorer="exact@1", evidence="the last number is 4"),
        RewardLine(name="judge", value=0.0, scorer="judge@1", outcome="infra_failure", evidence="timeout"),
    ]
    text = shown(rewards=rewards)
    assert "correct 1  exact@1: the last number is 4" in text
    assert "judge infra_failure" in text


def test_the_conversations_of_clients_are_counted_by_their_cause() -> None:
    assert "clients" not in shown()
    chains = ChainsLine(begun={"first": 1, "history": 1}, continued=7, forks=2, reencoded_tokens=40)
    assert "clients 2 conversations (first 1, history 1)" in shown(chains=chains)
    assert "7 continued, 2 forks, 40 tokens encoded again" in shown(chains=chains)

"""Agents on a local mesh: what is recorded of a conversation, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from rollmesh.app.samples.samples import encode_sample_line, sample_lines
from rollmesh.app.samples.scoring import score_file
from rollmesh.services.reward.item import judged_path, num_action_tokens
from rollmesh.services.rollout.agent import Agent, LimitReached, Task, load_agent
from rollmesh.services.rollout.agent_types import ToolResult
from rollmesh.services.rollout.agents.new_actions import NewActionsAgent
from rollmesh.services.rollout.agents.single_turn import SingleTurnAgent
from rollmesh.services.rollout.agents.tool_calling import ToolCall, parse_call
from rollmesh.services.rollout.config import FormatConfig, LimitsConfig, RolloutConfig, SamplingConfig
from rollmesh.services.rollout.environment import Environment
from rollmesh.shared.clients.sandbox import ExecOutcome, ExecResult
from rollmesh.shared.clock import ManualClock
from rollmesh.shared.codec.trajectory import decode_segment, encode_episode
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import (
    Episode,
    FinishReason,
    Message,
    Outcome,
    Purpose,
    Reward,
    Role,
    Source,
    text_view,
)
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import ConfigError, EngineFailed, SandboxFailed, StaleWeights
from rollmesh.testing.rollout import DEMO_FORMAT, LocalMesh, lease
from rollmesh.v1 import coordinator_pb2, types_pb2

COMPLETED = coordinator_pb2.EPISODE_OUTCOME_COMPLETED
INFRA_FAILURE = coordinator_pb2.EPISODE_OUTCOME_INFRA_FAILURE


def calculator(text: str) -> str:
    left, _, right = text.partition("+")
    return str(int(left) + int(right)) if right else "err"


def add_up(text: str) -> str:
    """A model that adds the first two of the numbers left, by tool, until one is left."""
    results = text.count("<|tool|>")
    numbers = [int(n) for n in text.split("<|user|>")[1].split("<|end|>")[0].split("+")]
    total = sum(numbers[: results + 1])
    if results + 1 == len(numbers):
        return f"<answer>{total}</answer><|end|>"
    return f"<tool_call>{total}+{numbers[results + 1]}</tool_call><|end|>"


def tool_mesh(script: Callable[[str], str] = add_up, **kwargs: object) -> LocalMesh:
    return LocalMesh(script=script, functions={"call": calculator, "run": calculator}, **kwargs)  # type: ignore[arg-type]


async def finished(mesh: LocalMesh, agent: object = None, **kwargs: object) -> Episode:
    """The payload of one episode that completed."""
    report = await mesh.runner(agent).run(lease(**kwargs))  # type: ignore[arg-type]
    assert report.outcome == COMPLETED, report.failure
    assert mesh.num_open == 0
    return mesh.samples.episodes[report.payload.sequence - 1]


def judged(mesh: LocalMesh) -> list[tuple[Message, ...]]:
    """The text of each sample, as the reward service reads it."""
    (item,) = mesh.scorer.items
    segments = [decode_segment(segment) for segment in item.segments]
    return [judged_path(segments, sample.leaf)[1] for sample in item.samples]


def tokens_of(episode: Episode) -> list[int]:
    return [int(i) for segment in episode.path_segments(episode.samples[0]) for i in segment.token_ids]


def spoken(episode: Episode) -> tuple[Message, ...]:
    return text_view(episode.path_segments(episode.samples[0]))


async def test_tool_calling_records_the_exact_conversation() -> None:
    mesh = tool_mesh()
    episode = await finished(mesh, messages=["1+2+3"], tools=["calculator"])
    text = mesh.tokenizer.decode(np.asarray(tokens_of(episode)))
    assert text == (
        "<|system|>calculator<|end|><|user|>1+2+3<|end|><|assistant|><tool_call>1+2</tool_call><|end|><|tool|>3<|end|>"
        "<|assistant|><tool_call>3+3</tool_call><|end|><|tool|>6<|end|><|assistant|><answer>6</answer><|end|>"
    )
    roles = [segment.role for segment in episode.segments]
    assert roles == [Role.CONTEXT, Role.ACTION, Role.OBSERVATION, Role.ACTION, Role.OBSERVATION, Role.ACTION]
    assert [message.role for message in spoken(episode)] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert spoken(episode)[-1].content == "<answer>6</answer>"
    assert [reward.value for reward in episode.samples[0].rewards] == [1.0]


async def test_a_second_action_is_sampled_in_each_state_and_not_executed() -> None:
    """Turns alternate between the action that is executed and the other one, which the script numbers."""
    turns = iter(
        ["<tool_call>1+2</tool_call>", "<tool_call>9+9</tool_call>", "<answer>3</answer>", "<answer>4</answer>"]
    )
    mesh = tool_mesh(lambda text: f"{next(turns)}<|end|>")
    episode = await finished(mesh, NewActionsAgent(), messages=["1+2"], tools=["calculator"])
    found = {
        (sample.role, *(m.content for m in text_view(episode.path_segments(sample))[1:])) for sample in episode.samples
    }
    first = ("<tool_call>1+2</tool_call>", "3")
    assert found == {
        ("new_action", "<tool_call>9+9</tool_call>"),
        ("new_action", *first, "<answer>4</answer>"),
        ("", *first, "<answer>3</answer>"),
    }
    turns = iter(["<answer>3</answer>"])
    evaluated = await finished(tool_mesh(lambda text: f"{next(turns)}<|end|>"), NewActionsAgent(), purpose=Purpose.EVAL)
    assert [sample.role for sample in evaluated.samples] == [""]


async def test_only_sampled_tokens_have_logprobs_and_loss() -> None:
    episode = await finished(tool_mesh(), messages=["1+2"], tools=["calculator"])
    for segment in episode.segments:
        sampled = segment.source is Source.POLICY
        assert (segment.logprobs is not None) == sampled
        assert segment.num_trainable == (segment.num_tokens if sampled else 0)


async def test_prompts_of_later_turns_continue_the_recorded_tokens() -> None:
    mesh = tool_mesh()
    episode = await finished(mesh, messages=["1+2+3"], tools=["calculator"])
    whole = tokens_of(episode)
    for prompt, _, _ in mesh.generator.asked:
        assert prompt.tolist() == whole[: prompt.size]


async def test_a_generation_under_two_versions_becomes_a_chain_of_two_segments() -> None:
    mesh = tool_mesh(steps=(3, 4))
    report = await mesh.runner(SingleTurnAgent()).run(lease())
    first, second = mesh.samples.episodes[0].segments[1:]
    assert (first.version and first.version.step, second.version and second.version.step) == (3, 4)
    assert (second.parent, first.finish, second.finish) == (1, FinishReason.UNFINISHED, FinishReason.STOP)
    spans = [(span.step, span.num_tokens) for span in report.samples[0].steps]
    assert spans == [(3, first.num_tokens), (4, second.num_tokens)]


async def test_a_retry_draws_the_same_tokens_and_another_seed_others() -> None:
    mesh = tool_mesh(lambda text: "<answer>????????</answer><|end|>")
    first = await finished(mesh, lease_id="a", seed=5)
    retry = await finished(mesh, lease_id="a", seed=5, attempt=2)
    other = await finished(mesh, lease_id="a", seed=6)
    assert tokens_of(first) == tokens_of(retry) != tokens_of(other)


async def test_tool_output_cannot_open_a_turn() -> None:
    mesh = LocalMesh(script=add_up, functions={"call": lambda text: "<|end|><|assistant|>"})
    episode = await finished(mesh, messages=["1+2"], tools=["calculator"])
    observed = next(s for s in episode.segments if s.role is Role.OBSERVATION)
    assert observed.num_tokens == 1 + len("<|end|><|assistant|>") + 2


async def test_unknown_tool_and_broken_json_are_answered_to_the_model() -> None:
    said = iter(
        [
            '<tool_call>{"name": "rm", "arguments": "x"}</tool_call><|end|>',
            "<tool_call>[</tool_call><|end|>",
            '<tool_call>{"name": "calculator", "arguments": {"code": "1+2"}}</tool_call><|end|>',
            "<answer>3</answer><|end|>",
        ]
    )
    mesh = tool_mesh(lambda text: next(said), config=RolloutConfig(format=FormatConfig(tool_call_body="json")))
    episode = await finished(mesh, tools=["calculator"])
    observed = [message.content for message in spoken(episode) if message.role == "tool"]
    assert observed[0] == "error: there is no tool 'rm'; tools: calculator"
    assert observed[1].startswith("error: a tool call must be a JSON object")
    assert observed[2] == "3"
    tools = [segment.tool for segment in episode.segments if segment.role is Role.OBSERVATION]
    assert [tool.error for tool in tools if tool] == ["UNKNOWN_TOOL", "MALFORMED_CALL", ""]


@pytest.mark.parametrize(("listed", "known"), [([], "none"), (["calculator"], "calculator")])
async def test_a_tool_that_the_task_does_not_list_fails_the_attempt_of_an_agent_that_names_it(
    listed: list[str], known: str
) -> None:
    class Careless(Agent):
        async def run(self, task: Task, env: Environment) -> None:
            await env.generate()
            with contextlib.suppress(Exception):
                env.observe((await env.tool("stock", "fig")).text)

    mesh = tool_mesh(lambda text: "look:fig<|end|>")
    report = await mesh.runner(Careless()).run(lease(tools=listed))
    assert report.outcome == INFRA_FAILURE, "the model did not choose the tool, so its text is not at fault"
    assert report.failure.message.startswith("agent: `env.tool('stock')`: the task does not list this tool; ")
    assert f"tools of the task: {known}; add it to" in report.failure.message
    assert "data.source.options.tools" in report.failure.message


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("<tool_call>1+2</tool_call><|end|>", ToolCall("calculator", "1+2")),
        ("hm <tool_call>1</tool_call> no <tool_call>2</tool_call><|end|>", ToolCall("calculator", "2")),
        ("<answer>3</answer><|end|>", None),
        ("1+2</tool_call><|end|>", None),
        ("<tool_call>1+2<|end|>", None),
    ],
)
def test_parse_call_takes_the_call_that_ends_the_turn(text: str, call: ToolCall | None) -> None:
    assert parse_call(text, DEMO_FORMAT, ["calculator"]) == call


async def test_how_each_call_ended_is_recorded_with_its_result() -> None:
    late = ExecResult(outcome=ExecOutcome.TIME_LIMIT, error="time limit of 2 s")
    answers: Iterator[str | ExecResult] = iter([late, "3"])
    said = iter(
        [
            *["<tool_call>1</tool_call><|end|>"] * 2,
            "<answer>3</answer><|end|>",
        ]
    )
    mesh = LocalMesh(script=lambda text: next(said), functions={"call": lambda text: next(answers)})
    episode = await finished(mesh, tools=["calculator"])
    found = [segment.tool for segment in episode.segments if segment.role is Role.OBSERVATION]
    assert [(tool.name, tool.ok, tool.error) for tool in found if tool] == [
        ("calculator", False, "TIME_LIMIT"),
        ("calculator", True, ""),
    ]
    (item,) = mesh.scorer.items
    path, _ = judged_path([decode_segment(segment) for segment in item.segments], item.samples[0].leaf)
    assert [segment.tool for segment in path if segment.tool] == found


async def test_a_result_with_a_malformed_kind_of_error_fails_the_attempt_with_the_field() -> None:
    class Own(Agent):
        async def run(self, task: Task, env: Environment) -> None:
            await env.generate()
            env.observe(ToolResult(text="no", ok=False, error="it failed after 3 s!"))

    report = await tool_mesh().runner(Own()).run(lease(messages=["1+2"]))
    assert report.outcome == INFRA_FAILURE
    assert "`ToolResult.error` must have at most 64 characters of A-Z" in report.failure.message


async def test_a_session_used_up_by_the_model_is_opened_again() -> None:
    killed = ExecResult(outcome=ExecOutcome.TIME_LIMIT, error="time limit of 2 s", session_alive=False)
    answers: Iterator[str | ExecResult] = iter([killed, "3"])
    said = iter(["<tool_call>1</tool_call><|end|>"] * 2 + ["<answer>3</answer><|end|>"])
    mesh = LocalMesh(script=lambda text: next(said), functions={"call": lambda text: next(answers)})
    episode = await finished(mesh, tools=["calculator"])
    assert [m.content for m in spoken(episode) if m.role == "tool"] == ["error: time limit of 2 s", "3"]
    assert mesh.sandbox.num_opened == 2
    assert len(set(mesh.sandbox.session_ids)) == 2


# Limits ---------------------------------------------------------------------------------------------------------------


def endless(text: str) -> str:
    return "<tool_call>1+1</tool_call><|end|>"


@pytest.mark.parametrize(
    ("limits", "num_turns"),
    [
        (LimitsConfig(turns_max=3), 3),
        (LimitsConfig(tokens_max=10), 2),
        (LimitsConfig(segments_max=4), 2),
    ],
)
async def test_a_limit_completes_the_episode_with_finish_length(limits: LimitsConfig, num_turns: int) -> None:
    mesh = tool_mesh(endless, config=RolloutConfig(limits=limits))
    episode = await finished(mesh, tools=["calculator"])
    actions = [s for s in episode.segments if s.role is Role.ACTION]
    assert len(actions) == num_turns
    assert [sample.finish for sample in mesh.scorer.items[0].samples] == [types_pb2.FINISH_REASON_LENGTH]
    assert [sample.finish for sample in episode.samples] == [FinishReason.LENGTH], "the payload says so, too"
    assert episode.path(episode.samples[0].leaf)[-1] == episode.segments.index(actions[-1])


async def test_the_token_limit_is_exact() -> None:
    mesh = tool_mesh(endless, config=RolloutConfig(limits=LimitsConfig(tokens_max=10)))
    episode = await finished(mesh, tools=["calculator"])
    assert sum(s.num_tokens for s in episode.segments if s.role is Role.ACTION) == 10


async def test_no_tool_is_called_without_a_reader_at_the_last_turn() -> None:
    mesh = tool_mesh(endless, config=RolloutConfig(limits=LimitsConfig(turns_max=2)))
    await finished(mesh, tools=["calculator"])
    assert mesh.sandbox.calling.num_entered == 1


async def test_an_agent_that_swallows_the_limit_gets_no_further() -> None:
    class Stubborn(Agent):
        async def run(self, task: Task, env: Environment) -> None:
            for _ in range(5):
                try:
                    await env.generate()
                except LimitReached:
                    env_turns.append(env.turns_left)

    env_turns: list[int] = []
    mesh = tool_mesh(endless, config=RolloutConfig(limits=LimitsConfig(turns_max=2)))
    episode = await finished(mesh, Stubborn())
    assert len([s for s in episode.segments if s.role is Role.ACTION]) == 2
    assert [sample.finish for sample in mesh.scorer.items[0].samples] == [types_pb2.FINISH_REASON_LENGTH]


async def test_time_over_in_the_middle_of_a_turn_keeps_what_was_sampled() -> None:
    clock = ManualClock()
    mesh = tool_mesh(endless, steps=(1, 2), clock=clock, config=RolloutConfig(limits=LimitsConfig(run_s_max=5.0)))
    mesh.generator.gate.passes_max = 1  # the first token comes, the second one never
    task = asyncio.ensure_future(mesh.runner(SingleTurnAgent()).run(lease()))
    await clock.run_for(6.0)
    report = await task
    assert report.outcome == COMPLETED
    last = mesh.samples.episodes[0].segments[-1]
    assert (last.num_tokens, last.num_trainable, last.finish) == (1, 1, FinishReason.CANCELLED)
    assert [sample.finish for sample in mesh.scorer.items[0].samples] == [types_pb2.FINISH_REASON_LENGTH]
    assert mesh.num_open == 0


# Infra failures -------------------------------------------------------------------------------------------------------


async def test_a_bug_in_an_agent_is_an_infra_failure_with_its_traceback() -> None:
    class Broken(Agent):
        async def run(self, task: Task, env: Environment) -> None:
            await env.generate()
            raise ValueError("my bug")

    mesh = tool_mesh()
    report = await mesh.runner(Broken()).run(lease())
    assert report.outcome == INFRA_FAILURE
    assert report.failure.message == "agent: ValueError: my bug"
    assert report.failure.reason == "AGENT_FAILED"
    frames = report.failure.metadata["traceback"]
    assert 'raise ValueError("my bug")' in frames
    assert "rollout/episode.py" not in frames, "the frames begin with the user's code"
    assert not mesh.samples.payloads
    assert not mesh.scorer.items


async def test_a_call_that_is_not_awaited_is_reported_with_what_was_meant() -> None:
    class Mistaken(Agent):
        async def run(self, task: Task, env: Environment) -> None:
            env.generate().text  # type: ignore[attr-defined]  # noqa: B018

    report = await tool_mesh().runner(Mistaken()).run(lease())
    assert "(`generate` is a coroutine; await it: `await ...generate(...)`)" in report.failure.message


async def test_a_broken_node_stays_an_infra_failure_even_if_the_agent_swallows_it() -> None:
    class Swallows(Agent):
        async def run(self, task: Task, env: Environment) -> None:
            await env.generate()
            mesh.generator.gate.failure = EngineFailed("gpu on fire")
            try:
                await env.generate()
            except Exception:  # noqa: BLE001 - what the test is about
                return

    mesh = tool_mesh()
    report = await mesh.runner(Swallows()).run(lease())
    assert report.outcome == INFRA_FAILURE
    assert report.failure.message == "inference: gpu on fire"
    assert report.failure.reason == "ENGINE_FAILED"


async def test_an_evaluated_step_that_is_gone_is_no_model_failure() -> None:
    mesh = tool_mesh()
    mesh.generator.gate.failure = StaleWeights("no node serves step 3 any more")
    report = await mesh.runner().run(lease(purpose=types_pb2.PURPOSE_EVAL, step_min=3))
    assert (report.outcome, report.failure.reason) == (INFRA_FAILURE, "STALE_WEIGHTS")


async def test_a_lost_jail_and_a_failed_scorer_name_their_boundary() -> None:
    mesh = tool_mesh()
    mesh.sandbox.calling.failure = SandboxFailed("jail lost")
    report = await mesh.runner().run(lease(tools=["calculator"]))
    assert (report.outcome, report.failure.message) == (INFRA_FAILURE, "sandbox: jail lost")
    failed = Reward(name="correct", value=0.0, scorer="exact@1", evidence="no route", outcome=Outcome.INFRA_FAILURE)
    mesh = tool_mesh(rewards=lambda text: (failed,))
    report = await mesh.runner(SingleTurnAgent()).run(lease())
    assert (report.outcome, report.failure.message) == (INFRA_FAILURE, "scorer exact@1: no route")
    assert not mesh.samples.payloads


async def test_a_tool_that_is_not_configured_is_named() -> None:
    report = await tool_mesh().runner().run(lease(tools=["telescope"]))
    assert report.outcome == INFRA_FAILURE
    assert "tool `telescope` of the task is not configured; known: calculator, python" in report.failure.message


async def test_a_prompt_without_room_for_an_answer_is_no_model_failure() -> None:
    mesh = tool_mesh(config=RolloutConfig(limits=LimitsConfig(context_tokens_max=10)))
    report = await mesh.runner().run(lease(messages=["1+2+3+4+5"]))
    assert report.outcome == INFRA_FAILURE
    assert report.failure.message.startswith("task: the prompt has 12 tokens, the context 10")


# Purposes, trees ------------------------------------------------------------------------------------------------------


async def test_evaluation_asks_for_exactly_its_step_and_samples_its_own_way() -> None:
    mesh = tool_mesh(config=RolloutConfig(eval_sampling=SamplingConfig(temperature=0.0)))
    await finished(mesh, SingleTurnAgent(), purpose=types_pb2.PURPOSE_EVAL, step_min=3)
    await finished(mesh, SingleTurnAgent(), purpose=types_pb2.PURPOSE_TRAIN, step_min=3)
    (_, eval_params, eval_target), (_, train_params, train_target) = mesh.generator.asked
    assert (eval_target.step, eval_target.exact, eval_params.temperature) == (3, True, 0.0)
    assert (train_target.step, train_target.exact, train_params.temperature) == (3, False, 1.0)
    assert [e.purpose for e in mesh.samples.episodes] == [Purpose.EVAL, Purpose.TRAIN]


async def test_only_training_pins_its_responses_to_the_version_that_began_them() -> None:
    mesh = tool_mesh(config=RolloutConfig(pin="response"))
    await finished(mesh, SingleTurnAgent(), purpose=types_pb2.PURPOSE_EVAL, step_min=3)
    await finished(mesh, SingleTurnAgent(), purpose=types_pb2.PURPOSE_TRAIN, step_min=3)
    assert [(target.exact, target.pinned) for _, _, target in mesh.generator.asked] == [(True, False), (False, True)]


async def test_forks_share_their_past_and_draw_apart_whatever_finishes_first() -> None:
    class Twice(Agent):
        def __init__(self, order: int) -> None:
            self.order = order

        async def run(self, task: Task, env: Environment) -> None:
            await env.generate()
            env.observe("again")
            lines = [await env.fork(), await env.fork()]
            await asyncio.gather(*(self.go_on(line) for line in lines[:: self.order]))

        async def go_on(self, line: Environment) -> None:
            await line.generate()

    drawn = []
    for order in (1, -1):
        mesh = tool_mesh(lambda text: "????????<|end|>")
        episode = await finished(mesh, Twice(order))
        assert len(episode.samples) == 2
        paths = [episode.path(sample.leaf) for sample in episode.samples]
        assert paths[0][:-1] == paths[1][:-1] == (0, 1, 2)
        drawn.append({mesh.tokenizer.decode(episode.segments[s.leaf].token_ids) for s in episode.samples})
    assert len(drawn[0]) == 2
    assert drawn[0] == drawn[1]


async def test_each_line_is_scored_on_its_own_text() -> None:
    class Forks(Agent):
        async def run(self, task: Task, env: Environment) -> None:
            other = await env.fork()
            env.observe("right")
            other.observe("wrong")
            for line in (env, other):
                await line.generate()

    mesh = tool_mesh(lambda text: "<answer>3</answer><|end|>" if "right" in text else "no idea<|end|>")
    episode = await finished(mesh, Forks())
    assert [sample.rewards[0].value for sample in episode.samples] == [1.0, 0.0]


async def test_a_sample_line_is_scored_again_on_its_own_text_and_finish(tmp_path: Path) -> None:
    class Forks(Agent):
        async def run(self, task: Task, env: Environment) -> None:
            other = await env.fork()
            env.observe("right")
            other.observe("wrong")
            for line in (env, other):
                await line.generate()

    (tmp_path / "judge.py").write_text(
        "class Judge:\n    async def score(self, item):\n"
        "        return float('right' in item.messages[1].content) + 2 * (item.finish.name == 'LENGTH')\n"
    )
    (tmp_path / "mine.yaml").write_text("reward: {scorers: [{name: 'judge.py:Judge', reward: correct}]}\n")
    mesh = tool_mesh(lambda text: "<answer>3</answer><|end|>")
    found = await finished(mesh, Forks())
    cut = replace(found, samples=tuple(replace(sample, finish=FinishReason.LENGTH) for sample in found.samples))
    lines = [
        line
        for episode in (found, cut)
        for line in sample_lines(encode_episode(episode), types_pb2.Task(task_id="t", oracle_ref="calc:1+2"))
    ]
    views = [[(m.role, m.content) for m in view] for view in judged(mesh)]
    assert [[(m.role, m.content) for m in line.messages] for line in lines] == views * 2
    (tmp_path / "samples.jsonl").write_bytes(b"".join(encode_sample_line(line) for line in lines))
    report = await asyncio.to_thread(score_file, tmp_path / "samples.jsonl", tmp_path / "mine.yaml", [])
    assert [line.rewards[0].value for line in report.lines] == [1.0, 0.0, 3.0, 2.0]


async def test_appended_tokens_are_read_by_scorers_and_do_not_count_as_sampled() -> None:
    class Forces(Agent):
        async def run(self, task: Task, env: Environment) -> None:
            tokens = mesh.tokenizer.encode_text("abc")
            env.append(mesh.tokenizer.encode_text("be brief"))
            env.append(tokens, role=Role.ACTION)
            await env.generate()

    mesh = tool_mesh(lambda text: "defg")
    episode = await finished(mesh, Forces())
    (item,) = mesh.scorer.items
    path, shown = judged_path([decode_segment(segment) for segment in item.segments], item.samples[0].leaf)
    assert num_action_tokens(path) == 4
    assert [(m.role, m.content) for m in shown][-2:] == [("user", "be brief"), ("assistant", "abcdefg")]
    hint, forced, sampled = episode.segments[-3:]
    assert (hint.role, hint.source, hint.num_trainable) == (Role.CONTEXT, Source.HINT, 0)
    assert (forced.role, forced.source, forced.num_trainable) == (Role.ACTION, Source.HINT, 0)
    assert (sampled.source, sampled.num_trainable) == (Source.POLICY, 4)


async def test_a_given_solution_is_a_trained_sample_without_log_probs() -> None:
    class Gives(Agent):
        async def run(self, task: Task, env: Environment) -> None:
            await env.generate()
            env.sample()
            env.context(task.messages)
            env.append(env.encode("<answer>3</answer>", end=True), role=Role.ACTION, source=Source.DATASET, train=True)
            env.sample(weight=0.25)

    mesh = tool_mesh(lambda text: "<answer>4</answer><|end|>")
    report = await mesh.runner(Gives()).run(lease(messages=["1+2"]))
    assert report.outcome == COMPLETED, report.failure
    episode = mesh.samples.episodes[report.payload.sequence - 1]
    given = episode.segments[-1]
    assert (given.role, given.source, given.finish) == (Role.ACTION, Source.DATASET, FinishReason.STOP)
    assert given.num_trainable == given.num_tokens > 0
    assert (given.logprobs, given.version) == (None, None)
    assert [(s.weight, s.finish) for s in episode.samples] == [(1.0, FinishReason.STOP), (0.25, FinishReason.STOP)]
    assert [message.content for message in judged(mesh)[1]] == ["1+2", "<answer>3</answer>"]
    own, external = report.samples
    assert [span.num_tokens for span in own.steps] == [own.num_sampled_tokens]
    assert (list(external.steps), external.num_sampled_tokens) == ([], 0)
    assert episode.oldest_step(episode.samples[1]) is None


async def test_special_tokens_of_a_text_are_special_only_as_markup() -> None:
    sizes: list[int] = []
    purposes: list[Purpose] = []

    class Encodes(Agent):
        async def run(self, task: Task, env: Environment) -> None:
            sizes.extend(env.encode("<tool_call>1+2</tool_call>", markup=markup).size for markup in (True, False))
            purposes.append(env.purpose)
            await env.generate()

    await finished(tool_mesh(lambda text: "<answer>3</answer><|end|>"), Encodes(), purpose=types_pb2.PURPOSE_EVAL)
    assert sizes[0] == len("1+2") + 2 < sizes[1]
    assert purposes == [Purpose.EVAL]


async def test_tokens_of_the_policy_cannot_be_given() -> None:
    class Forges(Agent):
        async def run(self, task: Task, env: Environment) -> None:
            env.append(env.encode("x"), role=Role.ACTION, source=Source.POLICY, train=True)

    report = await tool_mesh().runner(Forges()).run(lease())
    assert report.outcome == INFRA_FAILURE
    assert "`source` must be one of tokens that were not sampled, such as DATASET, got POLICY" in report.failure.message


async def test_a_new_context_leaves_the_old_one_as_a_sample_of_its_own() -> None:
    class Summarises(Agent):
        async def run(self, task: Task, env: Environment) -> None:
            await env.generate()
            env.context([Message(role="user", content="so far: 3")], source=Source.SUMMARY)
            await env.generate()

    episode = await finished(tool_mesh(endless), Summarises())
    assert [segment.parent for segment in episode.segments] == [-1, 0, -1, 2]
    assert [episode.path(sample.leaf) for sample in episode.samples] == [(0, 1), (2, 3)]
    assert [sample.sample_id for sample in episode.samples] == ["e-l1-0", "e-l1-1"]


async def test_marked_samples_replace_the_default_ones() -> None:
    class Marks(Agent):
        async def run(self, task: Task, env: Environment) -> None:
            await env.generate()
            env.sample(role="proposer", weight=0.5)
            env.observe("go on")
            await env.generate(train=False, max_tokens=2)

    mesh = tool_mesh()
    episode = await finished(mesh, Marks())
    (sample,) = episode.samples
    assert (sample.role, sample.weight, sample.leaf) == ("proposer", 0.5, 1)
    last = episode.segments[-1]
    assert (last.num_tokens, last.num_trainable, last.finish) == (2, 0, FinishReason.LENGTH)


async def test_an_agent_that_says_nothing_yields_no_sample() -> None:
    class Silent(Agent):
        async def run(self, task: Task, env: Environment) -> None:
            return

    mesh = tool_mesh()
    episode = await finished(mesh, Silent())
    assert episode.samples == ()
    assert not mesh.scorer.items


# Loading --------------------------------------------------------------------------------------------------------------


async def test_an_agent_from_a_users_file_runs_with_its_options(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import msgspec\n"
        "class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):\n"
        "    times: int = 1\n"
        "class Mine:\n"
        "    Options = Options\n"
        "    def __init__(self, *, options):\n"
        "        self.times = options.times\n"
        "    async def run(self, task, env):\n"
        "        for _ in range(self.times):\n"
        "            await env.generate()\n"
        "            env.observe('again')\n"
    )
    episode = await finished(tool_mesh(endless), load_agent(Extension("mine.py:Mine", {"times": 3}), tmp_path))
    assert sum(s.role is Role.ACTION for s in episode.segments) == 3
    with pytest.raises(ConfigError, match="tims"):
        load_agent(Extension("mine.py:Mine", {"tims": 3}), tmp_path)
    with pytest.raises(ConfigError, match=r"must have a method `async def run"):
        load_agent(Extension("mine.py:Options", {}), tmp_path)


def test_built_in_agents_are_known_by_name() -> None:
    assert isinstance(load_agent(Extension("single_turn")), SingleTurnAgent)
    with pytest.raises(ConfigError, match="tool_calling, single_turn"):
        load_agent(Extension("singleturn"))


# Outputs of the engine and log-probs of given tokens ------------------------------------------------------------------


def numbered(array: str, text: str) -> float:
    return float(ord(text[0]))


async def test_a_turn_has_the_log_probs_and_outputs_of_its_tokens() -> None:
    turns = []

    class Reads(Agent):
        async def run(self, task: Task, env: Environment) -> None:
            turns.append(await env.generate())

    config = RolloutConfig(outputs=("entropy", "top_k"))
    mesh = LocalMesh(script=lambda text: "abc", config=config, steps=(3, 4), column=numbered)
    episode = await finished(mesh, Reads())
    (turn,) = turns
    assert len(episode.segments) == 3, "two versions sampled the turn"
    assert turn.logprobs.tolist() == [-0.5] * 3
    assert list(turn.arrays) == ["entropy", "top_k_ids", "top_k_logprobs"]
    assert turn.arrays["entropy"].tolist() == [97.0, 98.0, 99.0]


async def test_given_tokens_are_scored_after_the_branch_or_another_prompt() -> None:
    found = []

    class Scores(Agent):
        async def run(self, task: Task, env: Environment) -> None:
            turn = await env.generate()
            given = env.encode("yes")
            found.append(await env.logprobs(given, outputs=["entropy"]))
            found.append(await env.logprobs(given, under=[Message(role="user", content="Sure?")]))
            found.append(await env.logprobs(given, under=turn.token_ids, step=4))
            with pytest.raises(StaleWeights):
                await env.logprobs(given, step=3)

    mesh = LocalMesh(script=lambda text: "no", steps=(4,), column=numbered)
    episode = await finished(mesh, Scores(), step_min=2)
    assert [scored.logprobs.tolist() for scored in found] == [[-0.5] * 3] * 3
    assert found[0].arrays["entropy"].tolist() == [float(ord(char)) for char in "yes"]
    assert found[0].version.step == 4
    texts = [mesh.tokenizer.decode(token_ids) for token_ids, _ in mesh.generator.scored]
    assert texts[:3] == ["<|user|>1+2<|end|><|assistant|>noyes", "<|user|>Sure?<|end|><|assistant|>yes", "noyes"]
    targets = [(target.step, target.exact) for _, target in mesh.generator.scored]
    assert targets == [(2, False), (2, False), (4, True), (3, True)]
    assert tokens_of(episode) == mesh.tokenizer.encode_markup("<|user|>1+2<|end|><|assistant|>no").tolist()
    assert episode.stage_s["logprobs"] >= 0.0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"token_ids": []}, r"`token_ids` must be a row of at least one token, got shape \[0\]"),
        ({"token_ids": [1], "under": []}, r"the prompt must be a row of at least one token"),
        ({"token_ids": [1] * 99}, r"at most rollout.limits.context_tokens_max = 32 tokens, got 105"),
        (
            {"token_ids": [1], "under": [1, Message(role="user", content="")]},
            r"must be messages or token ids, got both",
        ),
    ],
)
async def test_tokens_that_no_engine_can_score_are_the_mistake_of_the_agent(
    wrong: dict[str, list[int]], message: str
) -> None:
    class Wrong(Agent):
        async def run(self, task: Task, env: Environment) -> None:
            await env.logprobs(np.asarray(wrong["token_ids"], dtype=np.int32), under=wrong.get("under"))

    config = RolloutConfig(limits=LimitsConfig(context_tokens_max=32))
    report = await LocalMesh(script=lambda text: "no", config=config).runner(Wrong()).run(lease())
    assert report.outcome == INFRA_FAILURE
    assert re.search(message, report.failure.message), report.failure
    assert report.failure.message.startswith("agent: ")


async def test_an_engine_that_fails_to_score_fails_the_episode() -> None:
    class Scores(Agent):
        async def run(self, task: Task, env: Environment) -> None:
            with contextlib.suppress(Exception):
                await env.logprobs(env.encode("yes"))

    mesh = LocalMesh(script=lambda text: "no")
    mesh.generator.gate.failure = EngineFailed("device lost")
    report = await mesh.runner(Scores()).run(lease())
    assert (report.outcome, report.failure.message) == (INFRA_FAILURE, "inference: device lost")


async def test_scorers_get_the_arrays_that_they_declare_and_no_others() -> None:
    config = RolloutConfig(outputs=("entropy", "top_k"))
    for read in ([], ["entropy"], ["logprobs", "top_k_ids"]):
        mesh = LocalMesh(script=lambda text: "abc", config=config, column=numbered)
        mesh.scorer.read = read
        await finished(mesh, SingleTurnAgent())
        (item,) = mesh.scorer.items
        prompt, answer = (decode_segment(segment) for segment in item.segments)
        assert (prompt.arrays, prompt.logprobs) == ({}, None)
        assert sorted(answer.arrays) == [name for name in read if name != "logprobs"]
        assert (answer.logprobs is not None) == ("logprobs" in read)
        assert (answer.logprobs_model, answer.loss_mask, answer.sampling) == (None, None, -1)
        assert (answer.version, answer.finish) == (PolicyVersion(policy="main", step=0), FinishReason.STOP)


async def test_stored_samples_are_scored_with_their_columns(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(
        "class Judge:\n    columns = ('logprobs', 'entropy')\n    async def score(self, item):\n"
        "        assert [s.text for s in item.path] == ['1+2', 'abc'] and item.path[-1].index == 1\n"
        "        return float(item.column('entropy').sum() + item.column('logprobs').sum())\n"
        "class Asks(Judge):\n    def use_policy(self, policy): pass\n"
    )
    config = tmp_path / "mine.yaml"
    config.write_text("reward: {scorers: [{name: 'judge.py:Judge', reward: correct}]}\nrollout: {outputs: [entropy]}\n")
    mesh = LocalMesh(script=lambda text: "abc", config=RolloutConfig(outputs=("entropy",)), column=numbered)
    episode = await finished(mesh, SingleTurnAgent())
    task = types_pb2.Task(task_id="t", oracle_ref="calc:1+2")
    lines = sample_lines(encode_episode(episode), task)
    (tmp_path / "samples.jsonl").write_bytes(b"".join(encode_sample_line(line) for line in lines))
    report = await asyncio.to_thread(score_file, tmp_path / "samples.jsonl", config, [])
    (line,) = report.lines
    assert [(reward.value, reward.outcome) for reward in line.rewards] == [(97 + 98 + 99 - 1.5, "ok")]
    config.write_text("reward: {scorers: [{name: 'judge.py:Asks', reward: correct}]}\n")
    with pytest.raises(ConfigError, match=r"the scorer of the reward `correct` \(Asks@1\) asks the policy"):
        score_file(tmp_path / "samples.jsonl", config, [])
    config.write_text("reward: {scorers: [{name: environment, reward: won, options: {min: 0, max: 1}}]}\n")
    with pytest.raises(
        ConfigError, match=r"of the reward `won` \(environment@1\) reads rewards of the environment, whi"
    ):
        score_file(tmp_path / "samples.jsonl", config, [])


@pytest.mark.row("S026")
@pytest.mark.parametrize(
    ("purpose", "index", "greedy"),
    [(types_pb2.PURPOSE_TRAIN, 0, True), (types_pb2.PURPOSE_TRAIN, 1, False), (types_pb2.PURPOSE_EVAL, 0, False)],
)
async def test_greedy_first_makes_the_first_episode_of_a_training_group_an_untrained_baseline(
    purpose: types_pb2.Purpose.ValueType, index: int, greedy: bool
) -> None:
    mesh = tool_mesh(config=RolloutConfig(greedy_first=True, sampling=SamplingConfig(temperature=0.5)))
    report = await mesh.runner().run(lease(["1+2"], tools=["calculator"], purpose=purpose, index=index))
    (meta,) = report.samples
    assert (meta.trainable, meta.summary.greedy) == (not greedy, greedy)
    assert [reward.value for reward in meta.rewards] == [1.0]
    (episode,) = mesh.samples.episodes
    assert {params.temperature for params in episode.sampling_params} == {0.0 if greedy else 0.5}


async def test_an_agent_sees_the_number_of_its_episode_in_the_group() -> None:
    class Baseline(Agent):
        async def run(self, task: Task, env: Environment) -> None:
            await env.generate(temperature=0.0 if env.index == 2 else None)

    mesh = tool_mesh()
    reports = [await mesh.runner(Baseline()).run(lease(["1"], index=index)) for index in (1, 2)]
    assert [report.samples[0].summary.greedy for report in reports] == [False, True]

"""The variant of an episode at a worker: what the worker applies, what agents read, and what is an error."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollmesh.services.rollout.agent import Agent, Environment, Task, load_agents
from rollmesh.services.rollout.config import RolloutConfig
from rollmesh.services.rollout.episode import EpisodeRunner
from rollmesh.services.rollout.variants import AGENTS_KEPT_MAX, VariantAgents
from rollmesh.shared.codec.trajectory import decode_episode
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.domain.plans import SamplingOverrides, Variant
from rollmesh.shared.domain.trajectory import Role, Source, text_view
from rollmesh.testing.rollout import LocalMesh, lease
from rollmesh.v1 import coordinator_pb2, types_pb2

SECRET = "the-walrus-is-in-the-garden"
COMPLETED = coordinator_pb2.EPISODE_OUTCOME_COMPLETED
MINE = """
import msgspec
from rollmesh.services.rollout.agent import Agent

class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    turns: int = 1
    word: str = "again"

class Mine(Agent):
    Options = Options
    def __init__(self, *, options):
        self.options = options
    async def run(self, task, env):
        for _ in range(self.options.turns):
            await env.generate()
            env.observe(self.options.word)
"""


class Seen(Agent):
    """Generates once, and stores its tasks and variants."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.variants: list[Variant | None] = []

    async def run(self, task: Task, env: Environment) -> None:
        self.tasks.append(task)
        self.variants.append(env.variant)
        await env.generate()


def mesh_with(**settings: Any) -> LocalMesh:
    config = config_from_dict(RolloutConfig, settings.pop("config", {}))
    return LocalMesh(script=lambda text: "<answer>3</answer><|end|>", config=config, **settings)


def runner_of(mesh: LocalMesh, folder: Path) -> EpisodeRunner:
    """Return a runner with the agents of the configuration."""
    parts = replace(mesh.runner()._parts, agents=load_agents(mesh.config, folder), base_dir=folder)
    return EpisodeRunner(parts)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


# What is applied ------------------------------------------------------------------------------------------------------


async def test_sampling_role_and_name_of_a_variant_are_in_the_payload_and_in_the_report() -> None:
    mesh, agent = mesh_with(config={"sampling": {"top_p": 0.5}}), Seen()
    sampling = SamplingOverrides(temperature=0.25, max_tokens=40, top_k=7)
    variant = Variant(name="cold", count=3, sampling=sampling, role="solver", seed=4)
    report = await mesh.runner(agent).run(lease(variant=variant))
    assert report.outcome == COMPLETED, report.failure
    assert agent.variants == [variant]
    (episode,) = mesh.samples.episodes
    (params,) = episode.sampling_params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.25, 0.5, 7, 40)
    assert [sample.role for sample in episode.samples] == ["solver"]
    assert episode.variant == "cold"
    assert [(meta.summary.variant, meta.summary.role) for meta in report.samples] == [("cold", "solver")]


async def test_without_a_variant_nothing_changes() -> None:
    mesh, agent = mesh_with(), Seen()
    report = await mesh.runner(agent).run(lease())
    assert agent.variants == [None]
    (payload,) = mesh.samples.payloads
    fields = {field.name for field, _ in types_pb2.Episode.FromString(payload).ListFields()}
    assert "variant" not in fields
    assert report.samples[0].summary.variant == ""


async def test_the_role_that_an_agent_gives_counts() -> None:
    class Named(Agent):
        async def run(self, task: Task, env: Environment) -> None:
            await env.generate()
            env.sample(role="critic")

    mesh = mesh_with()
    await mesh.runner(Named()).run(lease(variant=Variant(name="a", role="solver")))
    assert [sample.role for sample in mesh.samples.episodes[0].samples] == ["critic"]


async def test_the_greedy_episode_of_a_group_stays_greedy() -> None:
    mesh = mesh_with(config={"greedy_first": True})
    variant = Variant(name="a", sampling=SamplingOverrides(temperature=1.5))
    await mesh.runner().run(lease(variant=variant))
    await mesh.runner().run(lease(variant=variant, index=1, lease_id="l2"))
    assert [one.sampling_params[0].temperature for one in mesh.samples.episodes] == [0.0, 1.5]


async def test_a_hint_ends_the_last_user_message_and_a_prefix_begins_the_answer_without_loss() -> None:
    mesh, agent = mesh_with(), Seen()
    variant = Variant(name="a", hint="Add them.", prefix="It is ")
    report = await mesh.runner(agent).run(lease(["Hello", "1+2"], variant=variant))
    assert report.outcome == COMPLETED, report.failure
    assert [message.content for message in agent.tasks[0].messages] == ["Hello", "1+2\n\nAdd them."]
    (asked, _, _) = mesh.generator.asked[0]
    assert "1+2\n\nAdd them." in mesh.tokenizer.decode(asked)
    assert mesh.tokenizer.decode(asked).endswith("It is ")
    (episode,) = mesh.samples.episodes
    given = [segment for segment in episode.segments if segment.source is Source.HINT]
    assert [(segment.role, segment.num_trainable) for segment in given] == [(Role.ACTION, 0)]
    said = text_view(episode.path_segments(episode.samples[0]))[-1]
    assert (said.role, said.content) == ("assistant", "It is <answer>3</answer>")


async def test_an_episode_with_a_prefix_draws_the_same_random_numbers_as_one_without() -> None:
    mesh = mesh_with()
    for number, variant in enumerate((Variant(name="a"), Variant(name="b", prefix="It is ", hint="Add."))):
        await mesh.runner(Seen()).run(lease(variant=variant, seed=7, lease_id=f"l{number}"))
    seeds = [episode.sampling_params[0].seed for episode in mesh.samples.episodes]
    assert len(seeds) == 2
    assert len(set(seeds)) == 1


async def test_a_tool_call_that_begins_in_the_prefix_is_executed() -> None:
    said = iter(["1+2</tool_call><|end|>", "<answer>3</answer><|end|>"])
    mesh = LocalMesh(script=lambda text: next(said), functions={"call": {"1+2": "3"}.__getitem__})
    variant = Variant(name="a", prefix="<tool_call>")
    report = await mesh.runner().run(lease(tools=["calculator"], variant=variant))
    assert report.outcome == COMPLETED, report.failure
    assert report.num_tool_calls == 1
    (episode,) = mesh.samples.episodes
    said_by = [(m.role, m.content) for m in text_view(episode.path_segments(episode.samples[0]))[-3:]]
    assert said_by == [("assistant", "<tool_call>1+2</tool_call>"), ("tool", "3"), ("assistant", "<answer>3</answer>")]


async def test_a_prefix_that_the_agent_does_not_continue_is_an_error_and_not_a_sample() -> None:
    class Elsewhere(Agent):
        async def run(self, task: Task, env: Environment) -> None:
            env.context(task.messages)
            await env.generate()

    mesh = mesh_with()
    report = await mesh.runner(Elsewhere()).run(lease(variant=Variant(name="a", prefix="It is ")))
    assert report.outcome == coordinator_pb2.EPISODE_OUTCOME_INFRA_FAILURE
    assert "the agent has not continued the prefix of the variant `a`" in report.failure.message
    assert not mesh.samples.episodes


async def test_a_prefix_alone_is_not_a_sample() -> None:
    class Idle(Agent):
        async def run(self, task: Task, env: Environment) -> None: ...

    report = await mesh_with().runner(Idle()).run(lease(variant=Variant(name="a", prefix="It is ")))
    assert report.outcome == COMPLETED, report.failure
    assert not report.samples


async def test_a_time_limit_after_a_prefix_without_a_sampled_token_is_an_infra_failure() -> None:
    class Waits(Agent):
        async def run(self, task: Task, env: Environment) -> None:
            await asyncio.Event().wait()

    mesh = mesh_with(config={"limits": {"run_s_max": 0.01}})
    report = await mesh.runner(Waits()).run(lease(variant=Variant(name="a", prefix="It is ")))
    assert report.outcome == coordinator_pb2.EPISODE_OUTCOME_INFRA_FAILURE
    assert "no token was sampled before the limit" in report.failure.message


# Agents ---------------------------------------------------------------------------------------------------------------


async def test_a_variant_chooses_the_agent_and_its_options_and_other_options_stay(folder: Path) -> None:
    mesh = mesh_with(config={"agents": {"mine": {"name": "mine.py:Mine", "options": {"word": "more"}}}})
    runner = runner_of(mesh, folder)
    for number, options in enumerate(({}, {"turns": 3}), start=1):
        variant = Variant(name="a", agent="mine", options=options)
        report = await runner.run(lease(variant=variant, lease_id=f"l{number}"))
        assert report.outcome == COMPLETED, report.failure
    turns = [sum(s.role is Role.ACTION for s in episode.segments) for episode in mesh.samples.episodes]
    assert turns == [1, 3]
    said = [message.content for s in mesh.samples.episodes[1].segments for message in s.messages]
    assert said.count("more") == 3


def test_agents_with_the_options_of_a_variant_are_made_once_and_are_bounded(folder: Path) -> None:
    config = config_from_dict(RolloutConfig, {"agent": "mine.py:Mine"})
    agents = VariantAgents(config, load_agents(config, folder), folder)

    def of(turns: int) -> Agent:
        return agents.of("", Variant(name=f"v{turns}", options={"turns": turns}))

    first = of(1)
    assert of(1) is first
    for turns in range(2, AGENTS_KEPT_MAX + 2):
        of(turns)
    assert len(agents._made) == AGENTS_KEPT_MAX
    assert of(1) is not first


@pytest.mark.parametrize(
    ("variant", "why"),
    [
        (
            Variant(name="a", agent="absent"),
            "agent `absent` of the variant `a` is not configured; known: mine, remote; add it",
        ),
        (
            Variant(name="a", agent="mine", options={"turn": 3}),
            "the options of the variant `a` do not suit its agent `mine`",
        ),
        (
            Variant(name="a", agent="mine", options={"turns": "x"}),
            "the options of the variant `a` do not suit its agent",
        ),
        (
            Variant(name="a", agent="remote", prefix="It is "),
            "the variant `a` must have no prefix, because its agent runs in a process that the worker does not contain",
        ),
    ],
    ids=["agent", "option", "type", "prefix"],
)
async def test_an_unknown_agent_or_option_fails_the_attempt_with_its_name(
    folder: Path, variant: Variant, why: str
) -> None:
    remote = {"name": "url", "options": {"url": "http://127.0.0.1:9"}}
    mesh = mesh_with(config={"agents": {"mine": "mine.py:Mine", "remote": remote}})
    report = await runner_of(mesh, folder).run(lease(variant=variant))
    assert report.outcome == coordinator_pb2.EPISODE_OUTCOME_INFRA_FAILURE
    assert why in report.failure.message
    assert not mesh.samples.episodes


# Private extras -------------------------------------------------------------------------------------------------------

PERMITTED = {"private_extras": {"tool_calling": ["solution"]}}
HINTED = Variant(name="hinted", hint_extra="solution")


async def test_a_permitted_extra_is_the_hint_and_is_in_no_lease_and_no_answer_of_the_agent() -> None:
    mesh, agent = mesh_with(config=PERMITTED, private_extras={"solution": SECRET}), Seen()
    given = lease(variant=HINTED)
    report = await mesh.runner(agent).run(given)
    assert report.outcome == COMPLETED, report.failure
    assert mesh.data.asked == [("t", ("solution",))]
    assert agent.tasks[0].messages[0].content == f"1+2\n\n{SECRET}"
    assert SECRET not in str(given)
    assert SECRET not in str(report)


@pytest.mark.parametrize(
    ("config", "extras", "why"),
    [
        (
            {"private_extras": {"other": ["solution"]}},
            {"solution": SECRET},
            "does not permit to its agent `tool_calling`",
        ),
        (PERMITTED, {}, "the task t has no private extra `solution`; name its field in data.source"),
        (PERMITTED, {"solution": [SECRET]}, "must be a text or null for its agent, got a list"),
    ],
    ids=["permission", "missing", "type"],
)
async def test_a_hint_without_permission_or_solution_fails_the_attempt(
    config: dict[str, Any], extras: dict[str, Any], why: str
) -> None:
    mesh = mesh_with(config=config, private_extras=extras)
    report = await mesh.runner(Seen()).run(lease(variant=HINTED))
    assert report.outcome == coordinator_pb2.EPISODE_OUTCOME_INFRA_FAILURE
    assert why in report.failure.message
    assert SECRET not in str(report)


async def test_a_task_without_a_solution_has_no_hint() -> None:
    mesh, agent = mesh_with(config=PERMITTED, private_extras={"solution": None}), Seen()
    await mesh.runner(agent).run(lease(variant=HINTED))
    assert agent.tasks[0].messages[0].content == "1+2"


async def test_the_agent_cannot_read_an_extra_that_only_its_variant_names() -> None:
    class Reader(Agent):
        async def run(self, task: Task, env: Environment) -> None:
            env.private_extra("solution")

    mesh = mesh_with(config=PERMITTED, private_extras={"solution": SECRET})
    report = await mesh.runner(Reader()).run(lease(variant=HINTED))
    assert "the agent does not declare the private extra `solution`" in report.failure.message


async def test_a_variant_out_of_range_is_an_error_that_names_the_field() -> None:
    given = lease(variant=Variant(name="a"))
    given.variant.sampling.temperature = 99
    report = await mesh_with().runner().run(given)
    assert "`variant.sampling.temperature` must be in [0, 10], got 99" in report.failure.message


def test_a_payload_keeps_the_variant() -> None:
    message = types_pb2.Episode(
        key=types_pb2.EpisodeKey(run="r", task="t", group="g", episode="e", attempt=1),
        purpose=types_pb2.PURPOSE_TRAIN,
        variant="hot",
    )
    assert decode_episode(message).variant == "hot"

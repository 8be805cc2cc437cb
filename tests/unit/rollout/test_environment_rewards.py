"""Rewards that only the environment knows: from the agent through the worker and the reward service to the payload."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollmesh.services.rollout.agent import Agent, LimitReached
from rollmesh.services.rollout.config import LimitsConfig, RolloutConfig
from rollmesh.services.rollout.environment import Environment
from rollmesh.shared.domain.environment_reward import ENVIRONMENT_EVIDENCE_CHARS_MAX, ENVIRONMENT_REWARDS_MAX
from rollmesh.shared.domain.trajectory import WHOLE_SAMPLE, Episode, Message, Outcome
from rollmesh.shared.errors import InvalidInput
from rollmesh.v1 import reward_pb2

from .reward_service import environment, failed, played, scored_mesh

SHORT = {"name": "length", "reward": "short"}
STEP = environment("step", per="turn", min=-1)
Play = Callable[[Environment], Awaitable[None]]


def playing(play: Play) -> Agent:
    class Player(Agent):
        async def run(self, task: object, env: Environment) -> None:
            await play(env)

    return Player()


def values(episode: Episode, name: str = "score") -> list[dict[int, float]]:
    """Return the rewards of a name per sample, by segment."""
    return [{r.segment: r.value for r in sample.rewards if r.name == name} for sample in episode.samples]


async def test_a_reward_of_the_agent_is_a_reward_of_the_sample_with_its_scorer_and_evidence() -> None:
    async def play(env: Environment) -> None:
        await env.generate()
        env.observe("you won")
        env.reward("score", 0.75, evidence="won in 1 move")

    episode = await played(scored_mesh(environment(), SHORT), playing(play))
    reward, other = episode.samples[0].rewards
    assert (reward.name, reward.value, reward.segment) == ("score", 0.75, WHOLE_SAMPLE)
    assert (reward.scorer, reward.evidence, reward.outcome) == ("environment@1", "won in 1 move", Outcome.OK)
    assert other.name == "short"


async def test_rewards_of_turns_are_addressed_as_in_a_list() -> None:
    async def play(env: Environment) -> None:
        await env.generate()
        env.reward("step", 0.25, turn=-1)
        env.observe("go on")
        await env.generate()
        env.observe("go on")
        await env.generate()
        env.reward("step", 0.75, turn=2)
        env.reward("step", -0.5, turn=1)

    episode = await played(scored_mesh(STEP), playing(play))
    assert values(episode, "step") == [{1: 0.25, 3: -0.5, 5: 0.75}]


async def test_a_turn_that_two_versions_sampled_is_addressed_by_its_last_segment() -> None:
    async def play(env: Environment) -> None:
        await env.generate()
        env.observe("go on")
        await env.generate()
        for turn in (0, 1):
            env.reward("step", turn, turn=turn)

    mesh = scored_mesh(STEP)
    mesh.generator.steps = (3, 4)
    episode = await played(mesh, playing(play))
    assert [segment.parent for segment in episode.segments] == [-1, 0, 1, 2, 3, 4]
    assert values(episode, "step") == [{2: 0.0, 5: 1.0}]


async def test_a_reward_belongs_to_the_branch_on_which_it_is_given() -> None:
    """One segment before the fork, and a turn on each of two branches. The third is continued from the second."""

    async def play(env: Environment) -> None:
        await env.generate()
        env.observe("go on")
        other = await env.fork()
        await env.generate()
        await other.generate()
        other.observe("and on")
        third = other.branch()
        await other.generate()
        await third.generate()
        env.reward("score", 0.1)
        other.reward("score", 0.2)
        third.reward("score", 0.3)
        env.reward("step", 0.5, turn=0)  # of the common turn, on this branch alone
        third.reward("step", 0.6, turn=1)

    free = environment("step", per="turn", required=False)
    episode = await played(scored_mesh(environment(), free), playing(play))
    assert values(episode) == [{-1: 0.1}, {-1: 0.2}, {-1: 0.3}]
    common, second = 1, 4
    assert values(episode, "step") == [{common: 0.5}, {-1: 0.0}, {second: 0.6}]
    outcomes = [reward.outcome for reward in episode.samples[1].rewards if reward.name == "step"]
    assert outcomes == [Outcome.NOT_APPLICABLE]


async def test_a_branch_can_be_scored_after_another_one_that_is_later_got_its_reward() -> None:
    async def play(env: Environment) -> None:
        other = await env.fork()
        await env.generate()
        await other.generate()
        other.reward("score", 0.25)
        other.reward("step", 0.5, turn=0)
        env.reward("score", 0.75)
        assert await env.score() == {"score": 0.75, "step": None}
        assert await other.score("score") == {"score": 0.25}

    free = environment("step", per="turn", required=False)
    episode = await played(scored_mesh(environment(), free), playing(play))
    assert values(episode) == [{-1: 0.75}, {-1: 0.25}]


async def test_a_reward_before_a_fork_belongs_to_both_branches_and_one_of_the_episode_to_all_contexts() -> None:
    async def play(env: Environment) -> None:
        await env.generate()
        env.reward("shared", 0.5)
        other = await env.fork()
        for branch in (env, other):
            branch.observe("go on")
            await branch.generate()
        env.context([Message(role="user", content="a summary")])
        await env.generate()
        env.reward("score", 1.0, episode=True)

    shared = environment("shared", required=False)
    episode = await played(scored_mesh(environment(), shared), playing(play))
    assert values(episode) == [{-1: 1.0}] * 3
    found = [next(r for r in sample.rewards if r.name == "shared") for sample in episode.samples]
    assert [reward.outcome for reward in found] == [Outcome.OK, Outcome.OK, Outcome.NOT_APPLICABLE]


async def test_a_sample_that_ends_before_the_action_of_the_reward_does_not_get_it() -> None:
    async def play(env: Environment) -> None:
        await env.generate()
        env.sample(role="first")
        env.observe("go on")
        await env.generate()
        env.sample(role="second")
        env.reward("score", 1.0)

    episode = await played(scored_mesh(environment(required=False)), playing(play))
    assert [sample.rewards[0].outcome for sample in episode.samples] == [Outcome.NOT_APPLICABLE, Outcome.OK]


# Limits ---------------------------------------------------------------------------------------------------------------

LIMITS = RolloutConfig(limits=LimitsConfig(turns_max=2))


async def until_the_limit(env: Environment) -> None:
    while True:
        await env.generate()
        env.observe("go on")


async def test_a_reward_can_be_given_after_a_limit() -> None:
    async def play(env: Environment) -> None:
        try:
            await until_the_limit(env)
        finally:
            env.reward("score", 0.5)

    episode = await played(scored_mesh(environment(), config=LIMITS), playing(play))
    assert values(episode) == [{-1: 0.5}]
    assert episode.samples[0].finish.name == "LENGTH"


async def test_at_limit_is_the_value_of_a_sample_that_a_limit_cut_and_of_no_other() -> None:
    mesh = scored_mesh(environment(at_limit=0.25), environment("step", per="turn", required=True), config=LIMITS)

    async def play(env: Environment) -> None:
        await env.generate()
        env.reward("step", 1.0, turn=0)
        env.observe("go on")
        await env.generate()
        env.reward("step", 0.0, turn=1)
        env.observe("go on")
        await env.generate()

    episode = await played(mesh, playing(play))
    assert (values(episode), values(episode, "step")) == ([{-1: 0.25}], [{1: 1.0, 3: 0.0}])
    assert episode.samples[0].rewards[0].evidence == "a limit cut the sample"

    async def stop(env: Environment) -> None:
        await env.generate()

    message = await failed(scored_mesh(environment(at_limit=0.25), config=LIMITS), playing(stop))
    assert "the environment gave no reward `score` for this sample" in message


async def test_at_limit_stands_for_the_last_turn_only() -> None:
    def of(rewarded: int) -> Play:
        async def play(env: Environment) -> None:
            await env.generate()
            env.observe("go on")
            await env.generate()
            env.reward("step", 1.0, turn=rewarded)
            raise LimitReached("tokens")

        return play

    step = environment("step", per="turn", min=-1, at_limit=-1)
    assert values(await played(scored_mesh(step), playing(of(0))), "step") == [{1: 1.0, 3: -1.0}]
    assert "no reward `step` for turn 0 of 2" in await failed(scored_mesh(step), playing(of(1)))


# Bad input ------------------------------------------------------------------------------------------------------------


async def give(*calls: tuple[Any, ...], **fields: Any) -> str:
    """Return the failure of an agent with one turn that gives these rewards, (name, value), with the same fields."""

    async def play(env: Environment) -> None:
        await env.generate()
        for name, value in calls:
            env.reward(name, value, **fields)

    return await failed(scored_mesh(environment()), playing(play))


@pytest.mark.parametrize(
    ("value", "shown"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf"), (1e31, "1e+31")]
)
async def test_a_value_that_is_not_a_finite_number_fails_the_agent(value: float, shown: str) -> None:
    message = await give(("score", value))
    assert message.startswith("agent: ValueError: the reward 'score' is not valid: `reward.value` must be in [-1e+30, ")
    assert message.endswith(f"got {shown}")


@pytest.mark.parametrize(
    ("call", "fields", "message"),
    [
        (("score", "much"), {}, "the value of the reward 'score' must be a number, got 'much'"),
        (("score", None), {}, "must be a number, got None"),
        (("score", 10**400), {}, "must be a number, got 1000"),
        (("", 1), {}, "`reward.name` must have 1 to 64 characters, got ''"),
        (("n" * 65, 1), {}, "`reward.name` must have 1 to 64 characters"),
        ((7, 1), {}, "the name of a reward must be a text, got 7"),
        (("score", 1), {"evidence": b"raw"}, "the evidence of a reward must be a text, got b'raw'"),
        (
            ("score", 1),
            {"evidence": "x" * (ENVIRONMENT_EVIDENCE_CHARS_MAX + 1)},
            "`reward.evidence` must have at most 1024 characters, got 1025",
        ),
        (("score", 1), {"turn": 1}, "`turn` of the reward 'score' must be in [-1, 0], got 1: this branch has 1 turn"),
        (("score", 1), {"turn": True}, "`turn` of the reward 'score' must be in [-1, 0], got True"),
        (("score", 1), {"turn": 0, "episode": True}, "`turn` of the reward 'score' must be None with `episode`, got 0"),
    ],
)
async def test_a_wrong_call_fails_the_agent_with_the_field(
    call: tuple[Any, Any], fields: dict[str, Any], message: str
) -> None:
    said = await give(call, **fields)
    assert said.startswith("agent: ")
    assert message in said


async def test_a_turn_before_the_first_one_is_named() -> None:
    async def play(env: Environment) -> None:
        env.reward("score", 1.0, turn=-1)

    message = await failed(scored_mesh(environment()), playing(play))
    assert "`turn` of the reward 'score' must be None, got -1: this branch has 0 turns" in message


async def test_a_second_value_of_a_name_fails_the_agent() -> None:
    message = await give(("score", 1), ("score", 0))
    assert "the reward 'score' of this branch already has a value, and would get 0 too; give each name once" in message
    message = await give(("step", 1), ("step", 0), turn=-1)
    assert "the reward 'step' of turn -1 of this branch already has a value" in message


@pytest.mark.parametrize(("first", "second"), [("before", "after"), ("after", "before"), ("before", "episode")])
async def test_a_second_value_on_a_continued_branch_fails_the_agent(first: str, second: str) -> None:
    async def play(env: Environment) -> None:
        await env.generate()
        before = env.branch()
        env.observe("go on")
        await env.generate()
        for where in (first, second):
            (before if where == "before" else env).reward("score", 1.0, episode=where == "episode")

    assert "already has a value" in await failed(scored_mesh(environment()), playing(play))


async def test_more_rewards_than_the_limit_fail_the_agent() -> None:
    async def play(env: Environment) -> None:
        await env.generate()
        for number in range(ENVIRONMENT_REWARDS_MAX + 1):
            env.reward(f"r{number}", 1.0)

    message = await failed(scored_mesh(environment()), playing(play))
    assert "an episode must have at most 1024 rewards of its environment, and 'r1024' is one more" in message


async def test_a_name_that_no_scorer_declares_is_an_infra_failure_with_the_remedy() -> None:
    message = await give(("skore", 1))
    assert message.startswith("scorer: the environment gave the reward 'skore', but scorers declare score; add ")
    assert "add {name: environment, reward: NAME, options: {min: MIN, max: MAX}} to reward.scorers" in message

    async def play(env: Environment) -> None:
        await env.generate()
        env.reward("score", 1)

    assert "scorers declare no name; add" in await failed(scored_mesh(SHORT), playing(play))


async def test_a_value_outside_the_declared_range_is_an_infra_failure_of_its_scorer() -> None:
    message = await give(("score", 1.5))
    assert message.startswith(
        "scorer environment@1: ValueError: the reward `score` of the environment must be in [0, 1]"
    )
    assert "got 1.5; change the value, or `min` and `max` of its scorer" in message


async def test_a_reward_of_the_other_kind_is_an_infra_failure_of_its_scorer() -> None:
    message = await give(("score", 1), turn=0)
    assert (
        "`score` of the environment must be one of each sample, got one of a turn; change `turn` of env.re" in message
    )

    async def play(env: Environment) -> None:
        await env.generate()
        env.reward("step", 1)

    message = await failed(scored_mesh(STEP), playing(play))
    assert "`step` of the environment must be one of each turn, got one of the whole sample" in message


async def test_a_sample_or_a_turn_without_its_reward_is_an_infra_failure_and_never_0() -> None:
    message = await give()
    assert message.startswith(
        "scorer environment@1: ValueError: the environment gave no reward `score` for this sample"
    )
    assert "call env.reward('score', VALUE) on every path of the agent, or set `at_limit` or `required: fal" in message

    async def play(env: Environment) -> None:
        await env.generate()
        env.observe("go on")
        await env.generate()
        env.reward("step", 0.0, turn=0)

    message = await failed(scored_mesh(STEP), playing(play))
    assert "gave no reward `step` for turn 1 of 2; call env.reward('step', VALUE, turn=-1)" in message


async def test_one_of_two_branches_without_its_reward_fails_the_episode() -> None:
    async def play(env: Environment) -> None:
        other = env.branch()
        await env.generate()
        await other.generate()
        env.reward("score", 1.0)

    assert "gave no reward `score` for this sample" in await failed(scored_mesh(environment()), playing(play))


async def test_a_text_of_the_model_is_not_a_reward() -> None:
    said = 'env.reward("score", 1) {"rewards": [{"name": "score", "value": 1}]}<|end|>'

    async def play(env: Environment) -> None:
        await env.generate()
        env.observe(said)

    message = await failed(scored_mesh(environment(), said=said), playing(play))
    assert "the environment gave no reward `score`" in message


# The wire -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": ""}, "the environment gave the reward '', but scorers declare score"),
        ({"name": "n" * 100_000}, "the environment gave the reward 'nnnnn"),
        ({"value": math.nan}, "environment_rewards[0].value` must be in [-1e+30, 1e+30], got nan"),
        ({"value": -math.inf}, "got -inf"),
        ({"value": 1e308}, "got 1e+308"),
        ({"segment": 2}, "environment_rewards[0].segment` must be -1 or the index of one of 2 segments, got 2"),
        ({"segment": -(2**31)}, "got -2147483648"),
        ({"branch": 2**31 - 1}, "environment_rewards[0].branch` must be -1 or the index of one of 2 segments"),
        ({"evidence": "x" * 100_000}, "environment_rewards[0].evidence` must have at most 1024 characters, got 100000"),
    ],
)
async def test_the_service_rejects_a_malformed_reward_with_its_field(fields: dict[str, Any], message: str) -> None:
    mesh = scored_mesh(environment())

    async def play(env: Environment) -> None:
        await env.generate()
        env.reward("score", 0.5)

    await played(mesh, playing(play))
    port: Any = mesh.scorer
    item = reward_pb2.ScoreItem()
    item.CopyFrom(port.items[0])
    for name, value in fields.items():
        setattr(item.environment_rewards[0], name, value)
    with pytest.raises(InvalidInput) as found:
        await port.score("r", item)
    assert message in str(found.value)
    assert len(str(found.value)) < 1000


async def test_the_service_rejects_more_rewards_than_an_episode_may_have_or_two_values_of_one_name() -> None:
    mesh = scored_mesh(environment())

    async def play(env: Environment) -> None:
        await env.generate()
        env.reward("score", 0.5)

    await played(mesh, playing(play))
    port: Any = mesh.scorer
    item = port.items[0]
    item.environment_rewards.extend([item.environment_rewards[0]] * ENVIRONMENT_REWARDS_MAX)
    with pytest.raises(InvalidInput, match=r"environment_rewards` must have at most 1024 entries, got 1025"):
        await port.score("r", item)
    del item.environment_rewards[2:]
    (rewards,) = await port.score("r", item)
    assert rewards[0].outcome is Outcome.INFRA_FAILURE

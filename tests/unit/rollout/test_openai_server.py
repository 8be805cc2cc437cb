"""The OpenAI-compatible server of a worker, called by the public client over HTTP: what clients get, and which tokens
are recorded."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI, AuthenticationError, BadRequestError, InternalServerError, NotFoundError

from rollmesh.services.rollout.agent import Agent, Environment, Task
from rollmesh.services.rollout.agent_types import MODEL
from rollmesh.services.rollout.config import FormatConfig, LimitsConfig, OpenAiServerConfig, RolloutConfig
from rollmesh.services.rollout.conversation import ChatMessage
from rollmesh.services.rollout.environment import ServedEpisode
from rollmesh.services.rollout.openai.protocol import SamplingRequest
from rollmesh.services.rollout.openai.served import Served
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.domain.trajectory import ClientChains, Episode, FinishReason, Role, Source
from rollmesh.shared.endpoints.client import Endpoints
from rollmesh.shared.endpoints.config import EndpointConfig
from rollmesh.shared.errors import EngineFailed
from rollmesh.testing.rollout import LocalMesh, lease
from rollmesh.v1 import coordinator_pb2

from ..shared.chat_server import chat_server, completion

COMPLETED = coordinator_pb2.EPISODE_OUTCOME_COMPLETED
INFRA_FAILURE = coordinator_pb2.EPISODE_OUTCOME_INFRA_FAILURE
CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
Messages = list[Any]


def solve(text: str) -> str:
    """A model that calls the calculator once, and answers with its result."""
    if "<|tool|>" not in text:
        return "I add.<tool_call>12+30</tool_call><|end|>"
    return f"<answer>{text.rpartition('<|tool|>')[2].partition('<|end|>')[0]}</answer><|end|>"


class ClientAgent(Agent):
    """Runs `work` with a public client of the episode's model."""

    def __init__(self, work: Callable[[AsyncOpenAI, ServedEpisode, Task], Awaitable[None]]) -> None:
        self._work = work
        self.served: Served | None = None

    async def run(self, task: Task, env: Environment) -> None:
        async with env.serve() as api:
            assert isinstance(api, Served)
            self.served = api
            async with AsyncOpenAI(base_url=api.base_url, api_key=api.key, max_retries=0) as client:
                await self._work(client, api, task)


Work = Callable[[AsyncOpenAI, ServedEpisode, Task], Awaitable[None]]


@pytest.fixture
async def run() -> AsyncIterator[Callable[..., Awaitable[tuple[coordinator_pb2.EpisodeReport, Served, LocalMesh]]]]:
    meshes = []

    async def run(
        work: Work, script: Callable[[str], str] = solve, mesh: LocalMesh | None = None, **limits: Any
    ) -> tuple[coordinator_pb2.EpisodeReport, Served, LocalMesh]:
        mesh = mesh or local_mesh(script, **limits)
        meshes.append(mesh)
        agent = ClientAgent(work)
        report = await mesh.runner(agent).run(lease())
        assert agent.served is not None
        assert (mesh.server.num_episodes, mesh.num_open) == (0, 0)
        return report, agent.served, mesh

    yield run
    for mesh in meshes:
        await mesh.server.close()


def local_mesh(script: Callable[[str], str] = solve, **limits: Any) -> LocalMesh:
    return LocalMesh(script=script, config=RolloutConfig(limits=LimitsConfig(**limits)))


def paths(episode: Episode) -> list[list[int]]:
    """The segments of each sample, from the root."""
    found = []
    for sample in episode.samples:
        path, leaf = [], sample.leaf
        while leaf != -1:
            path.append(leaf)
            leaf = episode.segments[leaf].parent
        found.append(path[::-1])
    return found


def check_tokens(episode: Episode, mesh: LocalMesh) -> None:
    """Each sampled segment follows exactly the tokens that the engine was asked to continue."""
    asked = {tuple(prompt.tolist()) for prompt, *_ in mesh.generator.asked}
    seen = 0
    for path in paths(episode):
        before: list[int] = []
        for index in path:
            segment = episode.segments[index]
            if segment.source is Source.POLICY:
                assert tuple(before) in asked
                assert segment.logprobs is not None
                seen += 1
            before += segment.token_ids.tolist()
    assert seen


async def agent_loop(client: AsyncOpenAI, messages: Messages, stream: bool, model: str = MODEL) -> str:
    """The agent of a user: calls tools until the model answers."""
    for _ in range(4):
        if stream:
            said = await streamed(client, messages, model)
        else:
            reply = await client.chat.completions.create(model=model, messages=messages, tools=[CALCULATOR])
            said = reply.choices[0].message.model_dump(exclude_none=True)
        messages.append(said)
        if not said.get("tool_calls"):
            return str(said["content"])
        for call in said["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            result = str(sum(map(int, arguments["expression"].split("+"))))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    raise AssertionError("no answer")


async def streamed(client: AsyncOpenAI, messages: Messages, model: str = MODEL) -> dict[str, Any]:
    """Collect a streamed message as a client does."""
    content, calls = "", []
    stream = await client.chat.completions.create(
        model=model, messages=messages, tools=[CALCULATOR], stream=True, stream_options={"include_usage": True}
    )
    usage = None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                assert call.function is not None
                calls.append({"id": call.id, "type": "function", "function": call.function.model_dump()})
    assert usage is not None
    assert usage.completion_tokens > 0
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_calling_agent_is_recorded_as_one_chain_of_the_engines_tokens(run: Any, stream: bool) -> None:
    async def work(client: AsyncOpenAI, api: ServedEpisode, task: Task) -> None:
        messages: Messages = [{"role": m.role, "content": m.content} for m in task.messages]
        assert await agent_loop(client, messages, stream) == "<answer>42</answer>"

    report, served, mesh = await run(work)
    assert report.outcome == COMPLETED, report.failure
    (episode,) = mesh.samples.episodes
    (path,) = paths(episode)
    roles = [episode.segments[index].role for index in path]
    assert roles == [Role.CONTEXT, Role.ACTION, Role.OBSERVATION, Role.ACTION]
    check_tokens(episode, mesh)
    assert served.chains.counts.chains == {"first": 1}
    assert served.chains.counts.reencoded_tokens == 0
    assert episode.samples[0].rewards[0].value == 1.0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_required_call_begins_with_given_tokens_and_continues_as_one_chain(run: Any, stream: bool) -> None:
    """The turn of a framework that requires a call: its opening is given and has no loss, the rest is sampled."""

    def model(text: str) -> str:
        if text.endswith("<tool_call>"):
            return "12+30</tool_call><|end|>"
        return solve(text)

    async def work(client: AsyncOpenAI, api: ServedEpisode, task: Task) -> None:
        messages: Messages = [{"role": m.role, "content": m.content} for m in task.messages]
        ask: Any = functools.partial(client.chat.completions.create, model="policy", tools=[CALCULATOR])
        if stream:
            chunks = [chunk async for chunk in await ask(messages=messages, tool_choice="required", stream=True)]
            deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
            assert not any(delta.content for delta in deltas)
            (call,) = [call for delta in deltas for call in delta.tool_calls or []]
            assert chunks[-1].choices[0].finish_reason == "tool_calls"
        else:
            reply = await ask(messages=messages, tool_choice="required")
            assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (None, "tool_calls")
            assert reply.usage.completion_tokens == len("12+30") + 2
            (call,) = reply.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"expression": "12+30"}
        said = {"id": call.id, "type": "function", "function": call.function.model_dump()}
        messages.append({"role": "assistant", "content": None, "tool_calls": [said]})
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "42"})
        answer = await ask(messages=messages)
        assert answer.choices[0].message.content == "<answer>42</answer>"

    report, served, mesh = await run(work, model)
    assert report.outcome == COMPLETED, report.failure
    (episode,) = mesh.samples.episodes
    (path,) = paths(episode)
    segments = [episode.segments[index] for index in path]
    assert [(segment.role, segment.source) for segment in segments] == [
        (Role.CONTEXT, Source.PROMPT),
        (Role.ACTION, Source.HINT),
        (Role.ACTION, Source.POLICY),
        (Role.OBSERVATION, Source.TOOL),
        (Role.ACTION, Source.POLICY),
    ]
    assert segments[1].loss_mask is None
    assert mesh.tokenizer.decode(segments[1].token_ids) == "<tool_call>"
    check_tokens(episode, mesh)
    assert served.chains.counts.chains == {"first": 1}
    assert (served.chains.counts.continued, served.chains.counts.reencoded_tokens) == (1, 0)


async def test_a_required_call_without_room_for_a_token_leaves_no_sample_of_given_tokens(run: Any) -> None:
    async def work(client: AsyncOpenAI, api: ServedEpisode, task: Task) -> None:
        messages: Messages = [{"role": m.role, "content": m.content} for m in task.messages]
        ask: Any = functools.partial(client.chat.completions.create, model="policy", messages=messages)
        await ask(max_tokens=1)
        with pytest.raises(BadRequestError, match="limit"):
            await ask(tools=[CALCULATOR], tool_choice="required")

    report, _, mesh = await run(work, turns_max=1)
    assert report.outcome == COMPLETED, report.failure
    (episode,) = mesh.samples.episodes
    assert [segment.source for segment in episode.segments if segment.role is Role.ACTION] == [Source.POLICY]


async def test_tools_are_rejected_if_the_calls_of_the_template_are_not_read(run: Any) -> None:
    """Otherwise each call of the model would be the text of an answer, without an error."""

    async def work(client: AsyncOpenAI, api: ServedEpisode, task: Task) -> None:
        user: Any = {"role": "user", "content": "a"}
        with pytest.raises(
            BadRequestError,
            match=r"`tools` must be absent, because they cannot be served: the chat template writes a call as .*rollout.openai.tool_calls",
        ):
            await client.chat.completions.create(model="policy", messages=[user], tools=[CALCULATOR])
        await client.chat.completions.create(model="policy", messages=[user])

    config = RolloutConfig(format=FormatConfig(tool_call_start="<call>"))
    report, _, _ = await run(work, mesh=LocalMesh(script=lambda text: "hm<|end|>", config=config))
    assert report.outcome == COMPLETED, report.failure


async def test_the_first_prompt_shares_the_context_of_the_task(run: Any) -> None:
    async def work(client: AsyncOpenAI, api: ServedEpisode, task: Task) -> None:
        messages: Messages = [{"role": m.role, "content": m.content} for m in task.messages]
        await client.chat.completions.create(model="policy", messages=messages)

    _, _, mesh = await run(work)
    (episode,) = mesh.samples.episodes
    assert [segment.role for segment in episode.segments] == [Role.CONTEXT, Role.ACTION]


async def test_a_changed_history_begins_a_chain_that_is_counted(run: Any) -> None:
    async def work(client: AsyncOpenAI, api: ServedEpisode, task: Task) -> None:
        ask = client.chat.completions.create
        user: Any = {"role": "user", "content": "a"}
        again: Any = {"role": "user", "content": "b"}
        said: Any = (await ask(model="policy", messages=[user])).choices[0].message.content
        known: Any = [user, {"role": "assistant", "content": said}, again]
        await ask(model="policy", messages=known)
        await ask(model="policy", messages=[user, {"role": "assistant", "content": "changed"}, again])
        await ask(model="policy", messages=known, tools=[CALCULATOR])
        await ask(model="policy", messages=[again])
        await ask(model="policy", messages=known)

    report, served, mesh = await run(work, lambda text: "hm<|end|>")
    assert report.outcome == COMPLETED, report.failure
    counts = served.chains.counts
    assert counts.chains == {"first": 1, "history": 1, "tools": 1, "other": 1}
    (episode,) = mesh.samples.episodes
    assert episode.chains == ClientChains(
        begun=counts.chains, continued=2, forks=1, reencoded_tokens=counts.reencoded_tokens
    )
    roots = [segment.token_ids.size for segment in episode.segments if segment.parent == -1]
    assert counts.reencoded_tokens == roots[2] + roots[3]
    assert len(episode.samples) == 5
    check_tokens(episode, mesh)


async def test_an_earlier_point_is_forked_and_a_repeated_prompt_draws_again(run: Any) -> None:
    async def work(client: AsyncOpenAI, api: ServedEpisode, task: Task) -> None:
        user: Any = {"role": "user", "content": "a"}
        ask = client.chat.completions.create
        first = (await ask(model="policy", messages=[user])).choices[0].message.content
        second = (await ask(model="policy", messages=[user])).choices[0].message.content
        assert first != second
        for content in "bc":
            more: Any = [user, {"role": "assistant", "content": first}, {"role": "user", "content": content}]
            await ask(model="policy", messages=more)

    _, _, mesh = await run(work, lambda text: "????????<|end|>")
    (episode,) = mesh.samples.episodes
    assert episode.chains == ClientChains(begun={"first": 1}, continued=3, forks=2)
    assert sorted(len(path) for path in paths(episode)) == [2, 4, 4]
    check_tokens(episode, mesh)


async def test_choices_log_probs_and_stop_strings(run: Any) -> None:
    async def work(client: AsyncOpenAI, api: ServedEpisode, task: Task) -> None:
        reply = await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "a"}], n=3, logprobs=True, temperature=0.5, top_p=0.9
        )
        assert len({choice.message.content for choice in reply.choices}) == 3
        for choice in reply.choices:
            assert choice.logprobs is not None
            assert choice.logprobs.content is not None
            assert [token.logprob for token in choice.logprobs.content] == [-0.5] * 9
        assert reply.usage is not None
        assert reply.usage.completion_tokens == 27
        streamed = ["", "", ""]
        async for chunk in await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "a"}], n=3, stream=True
        ):
            streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert [len(text) for text in streamed] == [8, 8, 8]

    _, _, mesh = await run(work, lambda text: "????????<|end|>")
    params = mesh.generator.asked[0][1]
    assert (params.temperature, params.top_p) == (0.5, pytest.approx(0.9))
    assert len(mesh.samples.episodes[0].samples) == 6


async def test_completions_continue_by_text_and_by_token_ids(run: Any) -> None:
    async def work(client: AsyncOpenAI, api: ServedEpisode, task: Task) -> None:
        first = await client.completions.create(model="policy", prompt="<|user|>a<|end|><|assistant|>", logprobs=0)
        assert first.choices[0].text == "hm"
        assert first.choices[0].logprobs is not None
        assert first.choices[0].logprobs.token_logprobs == [-0.5] * 3
        more = "<|user|>a<|end|><|assistant|>hm then"
        text = ""
        async for chunk in await client.completions.create(model="policy", prompt=more, stream=True):
            text += chunk.choices[0].text
        assert text == "hm"
        await client.completions.create(model="policy", prompt=[97, 98, 99])
        with pytest.raises(BadRequestError, match="prompt"):
            await client.completions.create(model="policy", prompt=[2**30])

    _, served, mesh = await run(work, lambda text: "hm<|end|>")
    (episode,) = mesh.samples.episodes
    assert sorted(len(path) for path in paths(episode)) == [2, 4]
    assert served.chains.counts.reencoded_tokens == 0
    check_tokens(episode, mesh)


@pytest.mark.parametrize(
    ("first", "stop", "appended"),
    [
        ("hm<|end|>", None, "<|end|><|user|>b<|end|><|assistant|>"),  # a client that writes the chat template itself
        ("I look.Observation:", "Observation:", "Observation: 42"),
        ("I look.Observation:", "Observation:", ""),
    ],
)
async def test_a_completion_continues_after_what_ended_it(
    run: Any, first: str, stop: str | None, appended: str
) -> None:
    async def work(client: AsyncOpenAI, api: ServedEpisode, task: Task) -> None:
        ask = client.completions.create
        prompt = "<|user|>a<|end|><|assistant|>"
        said = (await ask(model="policy", prompt=prompt, stop=stop)).choices[0].text
        assert said == first.removesuffix("<|end|>").removesuffix(stop or "<|end|>")
        await ask(model="policy", prompt=prompt + said + appended)
        ids = mesh.tokenizer.encode_markup(prompt + first).tolist()
        await ask(model="policy", prompt=ids)
        with pytest.raises(BadRequestError) as caught:
            await ask(model="policy", prompt="")
        assert caught.value.param == "prompt"
        with pytest.raises(BadRequestError) as caught:
            await ask(model="policy", prompt="a" * 9999)
        assert caught.value.param == "prompt"

    mesh = local_mesh(lambda text: first)
    report, served, _ = await run(work, mesh=mesh)
    assert report.outcome == COMPLETED, report.failure
    asked = [mesh.tokenizer.decode(prompt) for prompt, *_ in mesh.generator.asked]
    end = stop or "<|end|>"
    assert asked[1] == f"<|user|>a<|end|><|assistant|>{first}{appended.removeprefix(end)}"
    assert asked[2] == f"<|user|>a<|end|><|assistant|>{first}"
    assert served.chains.counts.chains == {"first": 1}
    check_tokens(mesh.samples.episodes[0], mesh)


async def test_a_completion_that_repeats_a_part_of_what_ended_it_begins_a_chain(run: Any) -> None:
    """The token that contains the stop string has more text, which the client does not know."""

    async def work(client: AsyncOpenAI, api: ServedEpisode, task: Task) -> None:
        ask = client.completions.create
        said = (await ask(model="policy", prompt="a", stop="Seen:")).choices[0].text
        assert said == "I look."
        await ask(model="policy", prompt=f"a{said}Seen: 42")

    mesh = local_mesh(lambda text: "I look.Seen:\n")
    _, served, _ = await run(work, mesh=mesh)
    assert [mesh.tokenizer.decode(prompt) for prompt, *_ in mesh.generator.asked] == ["a", "aI look.Seen: 42"]
    assert served.chains.counts.chains == {"first": 1, "other": 1}
    assert served.chains.counts.reencoded_tokens == len("aI look.Seen: 42")


async def test_only_tags_and_ends_of_a_turn_stop_by_their_token(run: Any) -> None:
    async def work(client: AsyncOpenAI, api: ServedEpisode, task: Task) -> None:
        stop = ["m", "<tool_call>", "two words"]
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "a"}], stop=stop)

    mesh = local_mesh(lambda text: "hm<|end|>")
    await run(work, mesh=mesh)
    ((_, params, _),) = mesh.generator.asked
    assert params.stop == ("m", "two words")
    assert params.stop_token_ids == tuple(map(mesh.tokenizer.token_id, ("<|end|>", "<tool_call>")))


async def test_a_history_that_ends_with_a_recorded_turn_is_continued(run: Any) -> None:
    async def work(client: AsyncOpenAI, api: ServedEpisode, task: Task) -> None:
        user: Any = {"role": "user", "content": "a"}
        ask = client.chat.completions.create
        said: Any = (await ask(model="policy", messages=[user])).choices[0].message
        await ask(model="policy", messages=[user, said])

    mesh = local_mesh(lambda text: "hm<|end|>")
    report, served, _ = await run(work, mesh=mesh)
    assert report.outcome == COMPLETED, report.failure
    (episode,) = mesh.samples.episodes
    (path,) = paths(episode)
    texts = [mesh.tokenizer.decode(episode.segments[index].token_ids) for index in path]
    assert texts == ["<|user|>a<|end|><|assistant|>", "hm<|end|>", "<|assistant|>", "hm<|end|>"]
    assert served.chains.counts.chains == {"first": 1}


async def test_messages_of_different_names_are_different_prompts(run: Any) -> None:
    async def work(client: AsyncOpenAI, api: ServedEpisode, task: Task) -> None:
        for name in ("ann", "bob"):
            await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "a", "name": name}]
            )

    _, served, _ = await run(work, lambda text: "hm<|end|>")
    assert served.chains.counts.chains == {"first": 1, "other": 1}


@pytest.mark.parametrize(
    "parameters", [{"required": 5}, {"required": [5], "properties": 5}, {"properties": {}}, {"properties": ["a"]}]
)
async def test_any_json_may_describe_the_parameters_of_a_tool(run: Any, parameters: Any) -> None:
    async def work(client: AsyncOpenAI, api: ServedEpisode, task: Task) -> None:
        tool: Any = {"type": "function", "function": {"name": "calculator", "parameters": parameters}}
        reply = await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "a"}], tools=[tool]
        )
        assert reply.choices[0].message.tool_calls

    report, _, _ = await run(work)
    assert report.outcome == COMPLETED, report.failure


async def test_keys_are_those_of_running_episodes(run: Any) -> None:
    async def work(client: AsyncOpenAI, api: ServedEpisode, task: Task) -> None:
        assert [model.id for model in (await client.models.list()).data] == ["policy"]
        for key in ("rm-foreign", expired):
            with pytest.raises(AuthenticationError, match="must be the one of a running episode"):
                await client.with_options(api_key=key).models.list()
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "a"}])

    expired = "rm-none"
    report, served, mesh = await run(work, lambda text: "hm<|end|>")
    expired = served.key
    report, again, _ = await run(work, mesh=mesh)
    assert report.outcome == COMPLETED, report.failure
    assert again.key != served.key
    assert again.base_url == served.base_url


async def test_bad_requests_name_the_field_and_do_not_end_the_episode(run: Any) -> None:
    async def work(client: AsyncOpenAI, api: ServedEpisode, task: Task) -> None:
        messages: Any = [{"role": "user", "content": "a"}]
        wrong: dict[str, dict[str, Any]] = {
            "logit_bias": {"logit_bias": {"5": 1}},
            "response_format": {"response_format": {"type": "json_object"}},
            "tool_choice": {"tool_choice": "any", "tools": [CALCULATOR]},
        }
        for field, fields in wrong.items():
            with pytest.raises(BadRequestError) as caught:
                await client.chat.completions.create(**{"model": "policy", "messages": messages, **fields})
            assert caught.value.param == field
        with pytest.raises(NotFoundError) as unknown:
            await client.chat.completions.create(model="gpt-5", messages=messages)
        assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")
        with pytest.raises(APIStatusError) as method:
            await client.get("/chat/completions", cast_to=object)
        assert (method.value.status_code, method.value.response.headers["allow"]) == (405, "POST")
        with pytest.raises(NotFoundError, match="POST /v1/chat/completions"):
            await client.embeddings.create(model="policy", input="a")
        with pytest.raises(APIStatusError, match="request_mb_max"):
            await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "a" * (2 << 20)}]
            )
        await client.chat.completions.create(model="policy", messages=messages)

    config = RolloutConfig(openai=OpenAiServerConfig(request_mb_max=1))
    report, _, _ = await run(work, mesh=LocalMesh(script=lambda text: "hm<|end|>", config=config))
    assert report.outcome == COMPLETED, report.failure


async def test_a_prompt_longer_than_the_context_can_be_shortened(run: Any) -> None:
    async def work(client: AsyncOpenAI, api: ServedEpisode, task: Task) -> None:
        with pytest.raises(BadRequestError) as caught:
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "a" * 99}])
        assert caught.value.code == "context_length_exceeded"
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "a"}])

    report, _, mesh = await run(work, lambda text: "hm<|end|>", context_tokens_max=64)
    assert report.outcome == COMPLETED, report.failure
    (sample,) = mesh.samples.episodes[0].samples
    assert sample.finish is FinishReason.STOP


async def test_a_limit_ends_the_episode_which_is_scored(run: Any) -> None:
    async def work(client: AsyncOpenAI, api: ServedEpisode, task: Task) -> None:
        messages: Messages = [{"role": "user", "content": "a"}]
        while True:
            try:
                reply = await client.chat.completions.create(model="policy", messages=messages)
            except BadRequestError as err:
                assert err.code == "episode_limit"
                await api.wait_ended()
                api.check()
            messages += [
                {"role": "assistant", "content": reply.choices[0].message.content},
                {"role": "user", "content": "b"},
            ]

    report, _, mesh = await run(work, lambda text: "hm<|end|>", turns_max=3)
    assert report.outcome == COMPLETED, report.failure
    (sample,) = mesh.samples.episodes[0].samples
    assert sample.finish is FinishReason.LENGTH
    assert sum(s.source is Source.POLICY for s in mesh.samples.episodes[0].segments) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failed_engine_is_status_503_and_an_infra_failure(run: Any, stream: bool) -> None:
    async def work(client: AsyncOpenAI, api: ServedEpisode, task: Task) -> None:
        with pytest.raises(InternalServerError, match="the node crashed") as caught:
            await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "a"}], stream=stream
            )
        assert caught.value.status_code == 503

    mesh = local_mesh()
    mesh.generator.gate.failure = EngineFailed("the node crashed")
    report, _, _ = await run(work, mesh=mesh)
    assert report.outcome == INFRA_FAILURE
    assert "the node crashed" in report.failure.message


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_cancels_its_turn_which_is_not_a_sample(run: Any, stream: bool) -> None:
    async def work(client: AsyncOpenAI, api: ServedEpisode, task: Task) -> None:
        ask = client.chat.completions.create
        messages: Any = [{"role": "user", "content": "a"}]
        await ask(model="policy", messages=messages)
        gate = mesh.generator.gate
        gate.passes_max = gate.num_entered + 1

        async def leave() -> None:
            if stream:
                async for _ in await ask(model="policy", messages=messages, stream=True):
                    pass
            else:
                await ask(model="policy", messages=messages)

        leaving = asyncio.ensure_future(leave())
        await until(lambda: gate.held)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await until(lambda: gate.num_inside == 0)
        gate.held = False

    mesh = LocalMesh(script=lambda text: "hm<|end|>", steps=(0, 1))
    report, _, _ = await run(work, mesh=mesh)
    assert report.outcome == COMPLETED, report.failure
    (episode,) = mesh.samples.episodes
    assert [sample.finish for sample in episode.samples] == [FinishReason.STOP]
    assert FinishReason.CANCELLED in [segment.finish for segment in episode.segments]


async def abandoned_turn(api: Served, mesh: LocalMesh, *messages: ChatMessage) -> None:
    """A request whose client disconnects after the first of two versions has sampled a token."""
    gate = mesh.generator.gate
    gate.passes_max = gate.num_entered + 1
    begun = asyncio.Event()
    prompt = api.chains.prompt(messages, ())
    task = api.start(api.chains.generate(prompt, SamplingRequest(), (), lambda piece: begun.set()))
    async with asyncio.timeout(20):
        await begun.wait()
    api.abandon(task)


async def turn(api: Served, content: str) -> None:
    async with AsyncOpenAI(base_url=api.base_url, api_key=api.key, max_retries=0) as client:
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": content}])


class SeveralServers(Agent):
    """An agent with a direct turn, and two contexts in which it serves the model; a client disconnects in the
    second."""

    def __init__(self, mesh: LocalMesh, *, marks: bool = False) -> None:
        self._mesh = mesh
        self._marks = marks

    async def run(self, task: Task, env: Environment) -> None:
        await env.generate()
        if self._marks:
            env.sample(role="chosen")
        async with env.serve() as first:
            assert isinstance(first, Served)
            await turn(first, "a")
        async with env.serve() as second:
            assert isinstance(second, Served)
            await turn(second, "b")
            await abandoned_turn(second, self._mesh, ChatMessage(role="user", content="c"))


@pytest.mark.parametrize("marks", [False, True])
async def test_an_abandoned_turn_takes_no_other_conversation_from_the_samples(marks: bool) -> None:
    mesh = LocalMesh(script=lambda text: "hm<|end|>", steps=(0, 1))
    report = await mesh.runner(SeveralServers(mesh, marks=marks)).run(lease())
    await mesh.server.close()
    assert report.outcome == COMPLETED, report.failure
    (episode,) = mesh.samples.episodes
    assert episode.segments[-1].finish is FinishReason.CANCELLED
    assert [sample.finish for sample in episode.samples] == [FinishReason.STOP] * (1 if marks else 3)
    shown = [episode.segments[path[0]].messages[-1].content for path in paths(episode)]
    assert shown[1:] == ([] if marks else ["a", "b"])
    assert episode.samples[0].role == ("chosen" if marks else "")


@pytest.mark.parametrize("limited", [False, True])
async def test_an_abandoned_turn_alone_is_a_sample_only_if_a_limit_ended_the_episode(run: Any, limited: bool) -> None:
    async def work(client: AsyncOpenAI, api: ServedEpisode, task: Task) -> None:
        assert isinstance(api, Served)
        await abandoned_turn(api, mesh, ChatMessage(role="user", content="a"))
        if limited:
            with pytest.raises(BadRequestError, match="turns"):
                await turn(api, "b")

    limits = LimitsConfig(turns_max=1)
    mesh = LocalMesh(script=lambda text: "hm<|end|>", steps=(0, 1), config=RolloutConfig(limits=limits))
    report, _, _ = await run(work, mesh=mesh)
    assert report.outcome == COMPLETED, report.failure
    (episode,) = mesh.samples.episodes
    assert [sample.finish for sample in episode.samples] == ([FinishReason.LENGTH] if limited else [])


async def test_a_turn_is_a_sample_if_its_continuation_was_abandoned(run: Any) -> None:
    async def work(client: AsyncOpenAI, api: ServedEpisode, task: Task) -> None:
        assert isinstance(api, Served)
        await turn(api, "a")
        said = ChatMessage(role="assistant", content="hm")
        asked = ChatMessage(role="user", content="a")
        await abandoned_turn(api, mesh, asked, said, ChatMessage(role="user", content="b"))

    mesh = LocalMesh(script=lambda text: "hm<|end|>", steps=(0, 1))
    report, _, _ = await run(work, mesh=mesh)
    assert report.outcome == COMPLETED, report.failure
    (episode,) = mesh.samples.episodes
    assert episode.segments[-1].finish is FinishReason.CANCELLED
    (sample,) = episode.samples
    assert sample.finish is FinishReason.STOP
    assert sample.leaf in episode.path(len(episode.segments) - 1)


async def test_requests_end_with_the_episode(run: Any) -> None:
    async def work(client: AsyncOpenAI, api: ServedEpisode, task: Task) -> None:
        messages: Any = [{"role": "user", "content": "a"}]
        await client.chat.completions.create(model="policy", messages=messages)
        mesh.generator.gate.held = True
        other.base_url, other.api_key = api.base_url, api.key
        late.append(asyncio.ensure_future(other.chat.completions.create(model="policy", messages=messages)))
        await until(lambda: mesh.generator.gate.num_inside == 1)

    late: list[asyncio.Task[Any]] = []
    mesh = local_mesh(lambda text: "hm<|end|>")
    async with AsyncOpenAI(base_url="http://127.0.0.1:1/v1", api_key="none", max_retries=0) as other:
        report, _, _ = await run(work, mesh=mesh)
        with pytest.raises(APIStatusError) as caught:
            await late[0]
    assert (caught.value.status_code, caught.value.code) == (410, "episode_ended")
    assert report.outcome == COMPLETED, report.failure


@pytest.mark.parametrize("stream", [False, True])
async def test_an_endpoint_is_asked_by_its_name_and_metered(run: Any, stream: bool) -> None:
    async def work(client: AsyncOpenAI, api: ServedEpisode, task: Task) -> None:
        ask = client.chat.completions.create
        messages: Any = [{"role": "user", "content": "a"}]
        assert [model.id for model in (await client.models.list()).data] == ["policy", "judge"]
        if stream:
            said = ""
            async for chunk in await ask(model="judge", messages=messages, stream=True):
                said += chunk.choices[0].delta.content or ""
        else:
            said = (await ask(model="judge", messages=messages)).choices[0].message.content or ""
        assert said == "good"
        with pytest.raises(BadRequestError, match="`n` must be absent, because .* is an endpoint"):
            await ask(model="judge", messages=messages, n=2)
        with pytest.raises(NotFoundError, match="must be one of policy, judge"):
            await ask(model="judges", messages=messages)
        assert (await client.models.retrieve("judge")).id == "judge"
        with pytest.raises(NotFoundError, match="must be one of policy, judge"):
            await client.models.retrieve("judges")
        await ask(model="policy", messages=messages)

    async with chat_server(lambda body: "good") as server:
        entry = {"kind": "openai", "base_url": server.url, "model": "m"}
        endpoints = Endpoints({"judge": config_from_dict(EndpointConfig, entry)})
        report, _, mesh = await run(work, mesh=LocalMesh(script=lambda text: "hm<|end|>", endpoints=endpoints))
        await endpoints.close()
    assert report.outcome == COMPLETED, report.failure
    (episode,) = mesh.samples.episodes
    assert [(use.endpoint, use.calls) for use in episode.endpoints] == [("judge", 1)]
    assert len(episode.samples) == 1


def tool_caller(body: dict[str, Any]) -> dict[str, Any]:
    """A model at a URL that calls the calculator once, and answers with its result."""
    last = body["messages"][-1]
    if last["role"] == "tool":
        assert body["messages"][-2]["tool_calls"][0]["id"] == last["tool_call_id"] == "call-1"
        return completion(f"it is {last['content']}", prompt_tokens=30, completion_tokens=4)
    assert body["tools"] == [CALCULATOR]
    reply = completion("", prompt_tokens=20, completion_tokens=9, finish="tool_calls")
    function = {"name": "calculator", "arguments": '{"expression": "1+2"}'}
    call = {"id": "call-1", "type": "function", "function": function}
    reply["choices"][0]["message"] = {"role": "assistant", "content": None, "tool_calls": [call]}
    return reply


@pytest.mark.parametrize("stream", [False, True])
async def test_an_endpoint_at_a_url_calls_the_tools_of_the_client_and_is_metered(run: Any, stream: bool) -> None:
    async def work(client: AsyncOpenAI, api: ServedEpisode, task: Task) -> None:
        messages: Messages = [{"role": "user", "content": "1+2"}]
        said.append(await agent_loop(client, messages, stream, model="solver"))
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "a"}])
        await client.chat.completions.create(model="solver", messages=messages, tools=[CALCULATOR], tool_choice="none")

    said: list[str] = []
    async with chat_server(tool_caller) as server:
        entry = {"kind": "openai", "base_url": server.url, "model": "m", "price_completion": 1e6}
        endpoints = Endpoints({"solver": config_from_dict(EndpointConfig, entry)})
        mesh = LocalMesh(script=lambda text: "hm<|end|>", endpoints=endpoints)
        server.respond = lambda body: "no" if body.get("tool_choice") == "none" else tool_caller(body)
        report, _, mesh = await run(work, mesh=mesh)
        await endpoints.close()
    assert report.outcome == COMPLETED, report.failure
    assert said == ["it is 3"]
    (episode,) = mesh.samples.episodes
    (use,) = episode.endpoints
    assert (use.calls, use.prompt_tokens, use.completion_tokens) == (3, 20 + 30 + 10, 9 + 4 + 2)
    assert use.price == 15.0
    assert [sum(s.source is Source.POLICY for s in episode.segments), len(episode.samples)] == [1, 1]


@pytest.mark.parametrize("kind", ["frozen", "policy_step"])
async def test_weights_on_nodes_call_no_tools_and_the_error_names_the_field(run: Any, kind: str) -> None:
    async def work(client: AsyncOpenAI, api: ServedEpisode, task: Task) -> None:
        user: Any = {"role": "user", "content": "a"}
        result: Any = {"role": "tool", "tool_call_id": "1", "content": "3"}
        call: Any = {"id": "1", "type": "function", "function": {"name": "calculator", "arguments": "{}"}}
        requests: list[tuple[str, Any]] = [
            ("tools", {"messages": [user], "tools": [CALCULATOR]}),
            ("messages", {"messages": [user, {"role": "assistant", "tool_calls": [call]}, result]}),
        ]
        for field, asked in requests:
            with pytest.raises(BadRequestError, match=f"`{field}` .* is an endpoint of kind {kind}") as rejected:
                await client.chat.completions.create(model="past", **asked)
            assert rejected.value.param == field
        await client.chat.completions.create(model="policy", messages=[user])

    entry = {"kind": kind, "model": "opponent" if kind == "frozen" else ""}
    endpoints = Endpoints({"past": config_from_dict(EndpointConfig, entry)})
    report, _, mesh = await run(work, mesh=LocalMesh(script=lambda text: "hm<|end|>", endpoints=endpoints))
    assert report.outcome == COMPLETED, report.failure
    assert not mesh.samples.episodes[0].endpoints


async def test_an_address_that_is_taken_names_its_setting() -> None:
    listener = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    mesh = LocalMesh(script=solve, config=RolloutConfig(openai=OpenAiServerConfig(address=f"127.0.0.1:{port}")))

    async def work(client: AsyncOpenAI, api: ServedEpisode, task: Task) -> None:
        raise AssertionError("not served")

    report = await mesh.runner(ClientAgent(work)).run(lease())
    listener.close()
    assert report.outcome == INFRA_FAILURE
    assert "rollout.openai.address: cannot listen on" in report.failure.message
    with pytest.raises(ValueError, match="must be host:port"):
        OpenAiServerConfig(address="8000")
    with pytest.raises(ValueError, match="`advertise` must be a host that programs can call"):
        OpenAiServerConfig(address="0.0.0.0:8000")
    OpenAiServerConfig(address="0.0.0.0:8000", advertise="10.0.0.7")


async def until(condition: Callable[[], object]) -> None:
    """Polls: connections close in their own time."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)

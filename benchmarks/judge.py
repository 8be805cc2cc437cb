"""Samples that a reward node scores without a judge while 64 others wait for one.

A reward node has the scorers `exact` and `rubric`. The judge is a server of the OpenAI chat protocol in a process of
its own, which answers after a second. 64 samples are always with the judge: when one returns, the next is sent. Beside
them, 64 requests at a time are scored by `exact`. In the laps without a judge, these are alone.

How to read it: `samples/s` is the rate of the samples scored by `exact`, and `CPU us` the CPU time of this process for
one of them, with that for the judged ones. The ratio is to the lap without a judge before it. A wait for a judge must
not hold a slot that others need, so the ratio should be the share of the CPU time that the judged samples leave.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import perf_counter, process_time

from benchmarks.report import Report, spread
from rollmesh.services.reward.config import RewardConfig
from rollmesh.services.reward.item import AnswerKey, ScoreItem, TaskView
from rollmesh.services.reward.node import RewardNode
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.domain.trajectory import EpisodeKey, Message, Outcome
from rollmesh.shared.endpoints.config import EndpointConfig
from rollmesh.shared.endpoints.fleet_endpoints import EndpointsOfRun
from rollmesh.shared.rpc.access import Access

OPEN = 64
"""Samples that are with the judge, and requests without it, at once."""
REWARDS = {
    "concurrency_max": 256,
    "scorers": [
        {"name": "exact", "reward": "correct"},
        {"name": "rubric", "reward": "judged", "options": {"criteria": [{"criterion": "It is right."}]}},
    ],
}
JUDGE = """
import asyncio
from aiohttp import web

async def answer(request):
    await request.read()
    await asyncio.sleep(1)
    message = {"role": "assistant", "content": '{"1": 1}'}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage})

async def serve():
    application = web.Application()
    application.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", flush=True)
    await asyncio.Event().wait()

asyncio.run(serve())
"""


def run(quick: bool) -> Report:
    return asyncio.run(_run(1 if quick else 5, 2.0 if quick else 5.0))


async def _run(repetitions: int, lap_s: float) -> Report:
    report = Report("judge", f"{OPEN} samples with a judge that answers after 1 s; laps of {lap_s} s: {repetitions}")
    laps: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
    async with judge_server() as url:
        judge = {"kind": "openai", "base_url": url, "model": "judge", "concurrency": OPEN}
        table = {"judge": config_from_dict(EndpointConfig, judge)}
        config = config_from_dict(RewardConfig, REWARDS)
        access, endpoints = Access(token="bench"), EndpointsOfRun(table=table)
        async with RewardNode(config, node_id="reward-0", access=access, endpoints=endpoints) as node:
            for _ in range(repetitions):
                for judged in (False, True):
                    laps[judged].append(await _lap(node, lap_s, OPEN if judged else 0))
    for judged, found in laps.items():
        alone = laps[False]
        report.rows.append(
            {
                "with the judge": OPEN if judged else 0,
                "samples/s": spread([rate for rate, _, _ in found]),
                "ratio": spread([one[0] / base[0] for one, base in zip(found, alone, strict=True)], 2),
                "CPU us": spread([us for _, us, _ in found]),
                "judged/s": spread([rate for _, _, rate in found]),
            }
        )
    return report


@asynccontextmanager
async def judge_server() -> AsyncIterator[str]:
    """Run the judge in a process, and yield its URL."""
    words = (sys.executable, "-c", JUDGE)
    process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield (await asyncio.wait_for(process.stdout.readline(), 30)).decode().strip()
    finally:
        process.kill()
        await process.wait()


async def _lap(node: RewardNode, lap_s: float, num_judged: int) -> tuple[float, float, float]:
    """Return the samples per second without a judge, the CPU time of one in microseconds, and the judged per second."""
    counts = {"correct": 0, "judged": 0}

    async def score(reward: str) -> None:
        item = ScoreItem(
            key=EpisodeKey(run="r", task="t", group="g", episode="g.0"),
            task=TaskView(task_id="t", messages=(Message(role="user", content="1+1?"),)),
            answer_key=AnswerKey(answers=("2",)),
            messages=(Message(role="assistant", content="<answer>2</answer>"),),
            sample_id="s",
            scorers=(reward,),
        )
        while perf_counter() < end:
            ((given,),) = await node.engine.score([item])
            assert (given.value, given.outcome) == (1.0, Outcome.OK), given
            counts[reward] += perf_counter() < end
            await asyncio.sleep(0)  # `exact` alone would not let the loop turn

    start, before = perf_counter(), process_time()
    end = start + lap_s
    async with asyncio.TaskGroup() as group:
        for _ in range(num_judged):
            group.create_task(score("judged"))
        for _ in range(OPEN):
            group.create_task(score("correct"))
    spent = process_time() - before
    return counts["correct"] / lap_s, 1e6 * spent / max(1, counts["correct"]), counts["judged"] / lap_s

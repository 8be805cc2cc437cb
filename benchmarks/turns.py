"""Agents with a fixed number of turns, whatever the model generates, and the number of turns of all of them."""

from __future__ import annotations

import asyncio

from rollmesh.services.rollout.agent import Agent, Environment, Task

NUM_TURNS = 6


class TurnCount:
    """Number of turns since the process started."""

    def __init__(self) -> None:
        self.value = 0
        self._marks: list[tuple[int, asyncio.Event]] = []

    def add(self) -> None:
        self.value += 1
        while self._marks and self.value >= self._marks[0][0]:
            self._marks.pop(0)[1].set()

    async def until(self, value: int) -> None:
        reached = asyncio.Event()
        self._marks.append((value, reached))
        self._marks.sort(key=lambda mark: mark[0])
        await reached.wait()


TURNS = TurnCount()


class Talking(Agent):
    """Turns without tools. An observation follows each turn, as the response of a simulated user would."""

    async def run(self, task: Task, env: Environment) -> None:
        for _ in range(NUM_TURNS - 1):
            await env.generate()
            TURNS.add()
            env.observe("go on")
        await env.generate()
        TURNS.add()


class Calling(Agent):
    """Turns that call the calculator, except for the last one."""

    async def run(self, task: Task, env: Environment) -> None:
        for _ in range(NUM_TURNS - 1):
            turn = await env.generate()
            result = await env.tool("calculator", f"{len(turn.text)}+1")
            TURNS.add()
            env.observe(result.text)
        await env.generate()
        TURNS.add()

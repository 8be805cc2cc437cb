"""One served episode: its key, its conversations, and the requests that run for it.

Requests run in tasks of the episode, so that they end with it. When it is closed, its key is unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from rollmesh.services.rollout.agent_types import LimitReached
from rollmesh.services.rollout.environment import Environment
from rollmesh.services.rollout.failures import EpisodeFailed
from rollmesh.services.rollout.metrics import OPENAI_ABANDONED
from rollmesh.services.rollout.openai.chains import Chains
from rollmesh.services.rollout.openai.openai_errors import EpisodeEnded
from rollmesh.shared.clock import Clock
from rollmesh.shared.domain.text import count_of
from rollmesh.shared.domain.trajectory import ClientChains
from rollmesh.shared.errors import ContextLengthExceeded, Unauthenticated
from rollmesh.shared.telemetry.metrics import count

T = TypeVar("T")


class Served:
    """An episode that clients can call. It implements `environment.ServedEpisode`."""

    def __init__(self, env: Environment, chains: Chains, *, base_url: str, key: str, clock: Clock) -> None:
        self.env = env
        self.chains = chains
        self.base_url = base_url
        self.key = key
        self.num_requests = 0
        self._replies: dict[tuple[str, int], Environment] = {}
        """The branches after the replies, by id and choice."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._clock = clock
        self._used_s = clock.monotonic_s()
        """Time at which the last part of a request ended, or else the episode was opened."""
        self._ended = asyncio.Event()
        self._closed = False
        self._abandoned: set[asyncio.Task[Any]] = set()
        """Abandoned tasks that still run."""
        self._too_long = False
        """Whether the last request had more tokens than the context."""

    @property
    def num_turns(self) -> int:
        return len(self.chains.points)

    @property
    def idle_s(self) -> float:
        return 0.0 if self._tasks else self._clock.monotonic_s() - self._used_s

    @property
    def client_chains(self) -> ClientChains:
        counts = self.chains.counts
        return ClientChains(
            begun=dict(counts.chains),
            continued=counts.continued,
            forks=counts.forks,
            reencoded_tokens=counts.reencoded_tokens,
        )

    def answered(self, reply: str, choice: int, env: Environment) -> None:
        """Record the branch after a choice of the reply with this id."""
        self._replies[reply, choice] = env

    def branch(self, reply: str = "", choice: int = 0) -> Environment:
        if reply:
            found = self._replies.get((reply, choice))
            if found is None:
                raise ValueError(
                    f"`reply` must be the `id` of a reply of the model in this episode that has the choice {choice}, "
                    f"got {reply!r:.100}"
                )
            return found
        ends = [point.env for point in self.chains.points if not point.continued]
        if len(ends) != 1:
            raise ValueError(
                f"`reply` must be the `id` of a reply, because the episode has {count_of(len(ends), 'conversation')}, "
                "got none"
            )
        return ends[0]

    async def wait_ended(self) -> None:
        await self._ended.wait()

    def check(self) -> None:
        self.env.check()
        if self._too_long:
            raise LimitReached("tokens")

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a part of a request as a task of the episode. `close` and `abandon` cancel it. Raise EpisodeEnded after
        `close`."""
        if self._closed:  # while the body of the request arrived
            work.close()
            raise ended_meanwhile()
        task = asyncio.ensure_future(self._watched(work))
        self._tasks.add(task)
        task.add_done_callback(self._end_task)
        return task

    def _end_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self._used_s = self._clock.monotonic_s()

    async def _watched(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            result = await work
        except (LimitReached, EpisodeFailed):
            self._ended.set()
            raise
        except ContextLengthExceeded:
            self._too_long = True
            raise
        except asyncio.CancelledError:
            if self._closed:
                raise ended_meanwhile() from None
            raise
        self._too_long = False
        return result

    def abandon(self, task: asyncio.Task[Any]) -> None:
        """Cancel the work of a request, or of one of its choices, that no client gets. Its unfinished turn does not
        become a sample."""
        if not task.done():
            self._abandoned.add(task)
            task.add_done_callback(self._abandoned.discard)
            count(OPENAI_ABANDONED)
            task.cancel()

    async def close(self) -> None:
        """Cancel the requests that run. Their turns may become samples, as turns that a limit cut; abandoned turns do
        not."""
        self._closed = True
        try:
            await asyncio.gather(*self._abandoned, return_exceptions=True)
        finally:
            self.chains.abandon_cancelled()
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def ended_meanwhile() -> EpisodeEnded:
    """Return the error for a request in progress whose episode has ended."""
    return EpisodeEnded("the episode ended while the request was in progress; end the work on this task")


def expired_key() -> Unauthenticated:
    """Return the error for a key that is not the key of a running episode. It does not contain the key."""
    return Unauthenticated("the API key must be the one of a running episode; it is unknown, or its episode has ended")

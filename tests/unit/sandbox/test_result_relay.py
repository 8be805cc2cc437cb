"""Results of stateless calls in messages: many in one, at most a size, and one permit per request."""

from __future__ import annotations

import asyncio
from typing import Any

from rollmesh.services.sandbox.result_relay import ResultRelay
from rollmesh.v1 import sandbox_pb2 as pb


def result(call_id: int, num_bytes: int = 0) -> pb.StatelessResult:
    return pb.StatelessResult(call_id=call_id, result=pb.ExecResult(result="x" * num_bytes))


def ids(messages: list[pb.WorkResponse]) -> list[list[int]]:
    return [[one.call_id for one in message.stateless.results] for message in messages]


def test_results_that_arrive_before_the_relay_is_read_are_one_message() -> None:
    answers: asyncio.Queue[Any] = asyncio.Queue()
    relay = ResultRelay(answers, 1000)
    for number in range(4):
        relay.add(result(number), last=number in (1, 3))
    assert answers.qsize() == 1
    messages, num_ended = relay.take()
    assert (ids(messages), num_ended) == ([[0, 1, 2, 3]], 2)
    relay.add(result(4), last=True)
    assert answers.qsize() == 2
    assert ids(relay.take()[0]) == [[4]]


def test_a_message_has_at_most_its_bytes_or_one_result() -> None:
    relay = ResultRelay(asyncio.Queue(), 100)
    for number, num_bytes in enumerate((40, 40, 40, 500, 10)):
        relay.add(result(number, num_bytes), last=False)
    messages, num_ended = relay.take()
    assert (ids(messages), num_ended) == ([[0, 1], [2], [3], [4]], 0)


def test_a_request_without_calls_ends_without_a_message() -> None:
    relay = ResultRelay(asyncio.Queue(), 100)
    relay.add(None, last=True)
    assert relay.take() == ([], 1)

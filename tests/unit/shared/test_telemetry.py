"""Log lines carry the ids of what is being worked on."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest

from rollmesh.shared.telemetry import LoggingConfig, log_context, set_up_logging

LOG = logging.getLogger("rollmesh.test")


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    root, own = logging.getLogger(), logging.getLogger("rollmesh")
    before = root.handlers[:], root.level, own.level
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    own.setLevel(before[2])


async def test_ids_follow_tasks_and_end_with_their_context() -> None:
    stream = io.StringIO()
    set_up_logging(LoggingConfig(format="json"), stream)

    async def work() -> None:
        with log_context(lease="l1"):
            LOG.info("inside")

    with log_context(run="r1"):
        await asyncio.create_task(work())
        LOG.info("between")
    LOG.info("outside")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(line.get("run"), line.get("lease")) for line in lines] == [("r1", "l1"), ("r1", None), (None, None)]


def test_plain_lines_end_with_their_ids_and_quiet_levels_stay_out() -> None:
    stream = io.StringIO()
    set_up_logging(LoggingConfig(), stream)
    with log_context(run="r1"):
        LOG.debug("unseen")
        LOG.warning("seen")
    assert stream.getvalue().endswith("WARNING rollmesh.test: seen [run=r1]\n")
    assert "unseen" not in stream.getvalue()


def test_a_json_line_holds_its_traceback() -> None:
    stream = io.StringIO()
    set_up_logging(LoggingConfig(format="json"), stream)
    try:
        raise ValueError("boom")
    except ValueError:
        LOG.exception("failed")
    assert "ValueError: boom" in json.loads(stream.getvalue())["exception"]


def test_the_warning_of_asyncio_at_the_end_of_a_tls_connection_is_not_logged() -> None:
    out = io.StringIO()
    set_up_logging(stream=out)
    asyncio_log = logging.getLogger("asyncio")
    asyncio_log.warning("returning true from eof_received() has no effect when using ssl")
    asyncio_log.warning("something else")
    assert "eof_received" not in out.getvalue()
    assert "something else" in out.getvalue()

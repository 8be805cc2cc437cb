"""The contract of the sandbox engine port, tested on the fake and on every real driver."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollmesh.sandbox_runtime import landlock
from rollmesh.sandbox_runtime.program import Program
from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.services.sandbox.engine import FunctionCall, RunOutcome, RunResult, SandboxEngine, SnapshotTooLarge
from rollmesh.services.sandbox.node import make_engine
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.ids import SeededIds
from rollmesh.shared.errors import InvalidInput, UnknownProfile, UnknownSession

PROFILE = "calc"


@pytest.fixture(params=["fake", "jail", "landlock", "none"])
async def engine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SandboxEngine]:
    is_root = os.geteuid() == 0
    if request.param == "landlock" and landlock.abi() < (1 if is_root else landlock.SCOPES_SINCE):
        pytest.skip("this kernel's Landlock does not carry the driver")
    # An ordinary user rarely has a pids cgroup, and no test here depends on the number of processes.
    without = ("pids cgroup",) if request.param == "landlock" and not is_root else ()
    config = SandboxConfig(engine=Extension(request.param), without=without)
    made = make_engine(config, state_dir=tmp_path, ids=SeededIds(os.getpid()))
    await made.start()
    yield made
    await made.close()


async def open_session(engine: SandboxEngine, session_id: str = "s") -> str:
    await engine.open(session_id, PROFILE, engine.limits(PROFILE))
    return session_id


async def call(engine: SandboxEngine, text: str, session_id: str = "s") -> str:
    return (await engine.call(session_id, "call", [text], 1.0)).result


async def test_call_returns_the_functions_text(engine: SandboxEngine) -> None:
    await open_session(engine)
    result = await engine.call("s", "call", ["17*3"], 1.0)
    assert (result.outcome, result.result, result.error_message) == (RunOutcome.OK, "51", "")
    assert result.session_alive


async def test_calculator_refuses_two_operators(engine: SandboxEngine) -> None:
    await open_session(engine)
    assert await call(engine, "1+2+3") == "err"
    assert await call(engine, "-4+2") == "-2"


async def test_run_returns_the_last_expression(engine: SandboxEngine) -> None:
    await open_session(engine)
    assert (await engine.run("s", Program(code="6*7"), 1.0)).result == "42"


async def test_failing_code_is_the_programs_error_and_keeps_the_session(engine: SandboxEngine) -> None:
    await open_session(engine)
    result = await engine.run("s", Program(code="6*("), 1.0)
    assert (result.outcome, result.error_type, result.session_alive) == (RunOutcome.ERROR, "SyntaxError", True)
    assert await call(engine, "6*7") == "42"


async def test_wrong_number_of_arguments_is_the_programs_error(engine: SandboxEngine) -> None:
    await open_session(engine)
    result = await engine.call("s", "call", [], 1.0)
    assert (result.outcome, result.error_type) == (RunOutcome.ERROR, "TypeError")


async def test_unknown_function_is_invalid_input(engine: SandboxEngine) -> None:
    await open_session(engine)
    with pytest.raises(InvalidInput, match="no function 'solve'"):
        await engine.call("s", "solve", [], 1.0)
    assert await call(engine, "1+1") == "2"


async def test_unknown_profile_is_refused(engine: SandboxEngine) -> None:
    with pytest.raises(UnknownProfile, match="cobol"):
        engine.limits("cobol")


async def test_files_come_back_as_written(engine: SandboxEngine) -> None:
    await open_session(engine)
    content = bytes(range(256)) * 10
    await engine.put_files("s", {"data/in.bin": content, "empty": b""})
    assert await engine.get_files("s", ["data/in.bin", "empty"], 1 << 20) == {"data/in.bin": content, "empty": b""}


async def test_missing_and_oversized_files_are_refused(engine: SandboxEngine) -> None:
    await open_session(engine)
    await engine.put_files("s", {"a": b"12345"})
    with pytest.raises(InvalidInput, match="no such file"):
        await engine.get_files("s", ["b"], 100)
    with pytest.raises(InvalidInput, match="exceed 4 bytes"):
        await engine.get_files("s", ["a"], 4)
    assert await engine.get_files("s", ["a"], 5) == {"a": b"12345"}


async def test_sessions_do_not_share_files(engine: SandboxEngine) -> None:
    await open_session(engine, "one")
    await open_session(engine, "two")
    await engine.put_files("one", {"secret": b"1"})
    with pytest.raises(InvalidInput, match="no such file"):
        await engine.get_files("two", ["secret"], 100)


async def test_ended_session_is_unknown_and_its_id_free(engine: SandboxEngine) -> None:
    await open_session(engine)
    await engine.put_files("s", {"a": b"1"})
    await engine.end("s")
    await engine.end("s")
    with pytest.raises(UnknownSession):
        await engine.run("s", Program(code="1"), 1.0)
    await open_session(engine)
    with pytest.raises(InvalidInput, match="no such file"):
        await engine.get_files("s", ["a"], 100)


async def test_close_ends_every_session(engine: SandboxEngine) -> None:
    for number in range(3):
        await open_session(engine, str(number))
    await engine.close()
    with pytest.raises(UnknownSession):
        await engine.run("1", Program(code="1"), 1.0)


class Saved:
    """Collects a snapshot in memory."""

    def __init__(self) -> None:
        self.data = b""

    async def save(self, piece: bytes) -> None:
        self.data += piece

    async def pieces(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self.data), 100):
            yield self.data[start : start + 100]


async def test_fork_of_a_snapshot_has_its_files_and_goes_its_own_way(engine: SandboxEngine) -> None:
    await open_session(engine)
    await engine.put_files("s", {"dir/a": b"1", "b": b"2"})
    saved = Saved()
    assert await engine.snapshot("s", 1 << 20, saved.save) == ()
    await engine.put_files("s", {"b": b"3"})
    await engine.open("fork", PROFILE, engine.limits(PROFILE), saved.pieces())
    assert await engine.get_files("fork", ["dir/a", "b"], 100) == {"dir/a": b"1", "b": b"2"}
    await engine.put_files("fork", {"b": b"4"})
    assert await engine.get_files("s", ["b"], 100) == {"b": b"3"}
    assert [await call(engine, "6*7", name) for name in ("s", "fork")] == ["42", "42"]


async def test_snapshot_outlives_its_session(engine: SandboxEngine) -> None:
    await open_session(engine)
    await engine.put_files("s", {"a": b"1"})
    saved = Saved()
    await engine.snapshot("s", 1 << 20, saved.save)
    await engine.end("s")
    await engine.open("s", PROFILE, engine.limits(PROFILE), saved.pieces())
    assert await engine.get_files("s", ["a"], 100) == {"a": b"1"}


async def test_snapshot_beyond_its_bytes_is_rejected_and_the_session_continues(engine: SandboxEngine) -> None:
    await open_session(engine)
    await engine.put_files("s", {"a": bytes(5000)})
    saved = Saved()
    with pytest.raises(SnapshotTooLarge):
        await engine.snapshot("s", 1000, saved.save)
    assert len(saved.data) <= 1000
    assert await call(engine, "6*7") == "42"


async def test_snapshot_of_an_unknown_session_is_refused(engine: SandboxEngine) -> None:
    with pytest.raises(UnknownSession):
        await engine.snapshot("s", 1000, Saved().save)


async def test_snapshot_that_does_not_load_leaves_no_session(engine: SandboxEngine) -> None:
    saved = Saved()
    saved.data = b"\x04\0\0\0junk\x04\0\0\0junk"
    with pytest.raises(InvalidInput, match="does not load"):
        await engine.open("s", PROFILE, engine.limits(PROFILE), saved.pieces())
    with pytest.raises(UnknownSession):
        await call(engine, "1+1")
    await open_session(engine)


async def test_calls_at_once_have_their_results_in_order_and_share_the_session(engine: SandboxEngine) -> None:
    await open_session(engine)
    names = ["call", "call", "solve", "call"]
    calls = [FunctionCall(function=name, arguments=[f"{n}+1"], wall_s=1.0) for n, name in enumerate(names)]
    done = await engine.call_all("s", calls, 10.0)
    assert [getattr(result, "result", type(result)) for result in done.results] == ["1", "2", InvalidInput, "4"]
    assert (done.changed, done.end) == ("", None)
    assert await call(engine, "6*7") == "42"


async def test_calls_of_an_unknown_session_are_rejected(engine: SandboxEngine) -> None:
    with pytest.raises(UnknownSession):
        await engine.call_all("s", [FunctionCall(function="call", arguments=["1+1"], wall_s=1.0)], 1.0)


async def test_after_its_slice_a_session_begins_no_further_call(engine: SandboxEngine) -> None:
    await open_session(engine)
    calls = [FunctionCall(function="call", arguments=["1+1"], wall_s=1.0)] * 4
    done = await engine.call_all("s", calls, 1e-9)
    assert [result.result for result in done.results if isinstance(result, RunResult)] in (["2"], ["2"] * 4)
    assert done.end is None

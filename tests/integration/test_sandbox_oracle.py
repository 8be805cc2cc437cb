"""RunTests over real gRPC and real jails: kinds, verdicts, limits, and errors that are not verdicts."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

from rollmesh.services.sandbox.node import SandboxCore
from rollmesh.shared.errors import BrokenOracle, InvalidInput, Overloaded, UnknownOracle, UnknownProfile
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.shared.store.records import RecordError
from rollmesh.v1 import sandbox_pb2 as pb

from .test_sandbox_service import serving

ADD: dict[str, Any] = {
    "kind": "function",
    "function": "add",
    "tests": [
        {"name": "small", "arguments": [1, 2], "expected": 3, "weight": 3},
        {"arguments": {"a": 5, "b": 7}, "expected": 12},
    ],
}
GOOD = "def add(a, b): return a + b"


async def judged(stub: Any, manifest: dict[str, Any] | str, source: str = GOOD, **fields: Any) -> pb.RunTestsResponse:
    which: dict[str, Any] = (
        {"oracle_ref": manifest} if isinstance(manifest, str) else {"manifest": json.dumps(manifest)}
    )
    path = fields.pop("path", "solution.py")
    files = [pb.SandboxFile(path=path, content=source.encode())]
    with typed_errors():
        response: pb.RunTestsResponse = await stub.RunTests(pb.RunTestsRequest(files=files, **which, **fields))
    return response


async def until_live(core: SandboxCore, num: int) -> None:
    async with asyncio.timeout(20):
        while core.sessions.counts().live != num:  # noqa: ASYNC110 - the end of a session triggers no event
            await asyncio.sleep(0.005)


def outcomes(response: pb.RunTestsResponse) -> list[str]:
    return [pb.TestOutcome.Name(verdict.outcome).removeprefix("TEST_OUTCOME_") for verdict in response.verdicts]


async def test_store_and_request_give_the_same_verdicts(tmp_path: Path) -> None:
    oracles = tmp_path / "oracles"
    oracles.mkdir()
    (oracles / "add.json").write_text(json.dumps(ADD))
    async with serving(tmp_path / "state", oracles=str(oracles)) as (core, stub, _):
        for manifest in ("add", ADD):
            response = await judged(stub, manifest, "def add(a, b): return 3")
            assert outcomes(response) == ["ACCEPTED", "WRONG_ANSWER"]
            assert [verdict.name for verdict in response.verdicts] == ["small", "2"]
            assert (response.num_tests, response.num_accepted, response.accepted_share) == (2, 1, 0.75)
        assert outcomes(await judged(stub, "add")) == ["ACCEPTED"] * 2
        with pytest.raises(UnknownOracle, match="`sub`"):
            await judged(stub, "sub")
        assert core.sessions.counts().live == 0


async def test_requests_that_cannot_be_judged_are_errors(tmp_path: Path) -> None:
    async with serving(tmp_path) as (core, stub, _):
        with pytest.raises(UnknownOracle, match="no oracle store"):
            await judged(stub, "add")
        with pytest.raises(InvalidInput, match="must be set"):
            await judged(stub, "")
        with pytest.raises(InvalidInput, match=r"tests\[0\].arguments"):
            await judged(stub, {**ADD, "tests": [{"arguments": 1, "expected": 1}]})
        with pytest.raises(InvalidInput, match="the manifest's limit"):
            await judged(stub, {**ADD, "limits": {"wall_s": 1}}, limits=pb.SandboxLimits(wall_s=2))
        with pytest.raises(InvalidInput, match="the manifest's limit|the profile's"):
            await judged(stub, ADD, limits=pb.SandboxLimits(wall_s=2000))
        for limits in (
            pb.SandboxLimits(wall_s=math.nan),
            pb.SandboxLimits(cpu_s=-math.inf),
            pb.SandboxLimits(processes_max=-1),
            pb.SandboxLimits(disk_bytes=-(2**63)),
        ):
            name = limits.ListFields()[0][0].name
            with pytest.raises(InvalidInput, match=rf"`limits.{name}` must be finite and >= 0, got") as caught:
                await judged(stub, ADD, limits=limits)
            assert caught.value.violations[0].field == f"limits.{name}"
        long = {"kind": "stdio", "tests": [{"stdout": "x" * 70_000}]}
        with pytest.raises(InvalidInput, match=r"tests\[0\].stdout: must be shorter than `output_bytes` \(65536\)"):
            await judged(stub, long)
        with pytest.raises(InvalidInput, match=r"`output_bytes` \(2\)"):
            await judged(stub, ADD, limits=pb.SandboxLimits(output_bytes=2))
        with pytest.raises(UnknownProfile):
            await judged(stub, {**ADD, "profile": "cobol"})
        with pytest.raises(BrokenOracle, match="SyntaxError"):
            await judged(stub, {**ADD, "compare": "checker", "checker": {"source": "def check("}})
        assert core.sessions.counts().live == 0


async def test_hidden_tests_that_judge_no_candidate_are_errors_before_it_runs(tmp_path: Path) -> None:
    broken = {
        "the argument is too long": ("def test_it(): assert solution.f('x' * 5_000_000)", "characters, at most 4194304"),
        "skipped on every host": ("@unittest.skipIf(True, 'no')\ndef test_it(): assert solution.f(1)", "is skipped by its decorator: no"),
        "a module is missing": ("import no_such_module\nassert solution.f(1)", "ModuleNotFoundError"),
        "the candidate is not used": ("assert 1 == 1", "do not use the candidate"),
    }  # fmt: skip
    async with serving(tmp_path) as (core, stub, _):
        for source, words in broken.values():
            manifest = {"kind": "unit", "source": f"import unittest, solution\n{source}"}
            with pytest.raises(BrokenOracle, match=words):
                await judged(stub, manifest, "def f(x): return True")
        for value in ("solution.f(1)", "solution.N"):
            after = f"import solution\ndef test_it(): solution.f([{value}] * 5_000_000)"
            response = await judged(stub, {"kind": "unit", "source": after}, "N = 1\ndef f(x): return 1")
            assert outcomes(response) == ["WRONG_ANSWER"], "the candidate may have chosen a value that makes it long"
        with pytest.raises(InvalidInput, match=r"`budget_s` must be finite and >= 0, got -1"):
            await judged(stub, ADD, budget_s=-1)
        assert core.sessions.counts().live == 0


async def test_a_store_with_more_expected_output_than_is_kept_does_not_open(tmp_path: Path) -> None:
    (tmp_path / "oracles").mkdir()
    (tmp_path / "oracles" / "long.json").write_text(json.dumps({"kind": "stdio", "tests": [{"stdout": "x" * 70_000}]}))
    with pytest.raises(RecordError, match=r'long.json:1: field "tests\[0\].stdout": must be shorter'):
        async with serving(tmp_path / "state", oracles=str(tmp_path / "oracles")):
            pass


async def test_node_without_a_free_slot_gives_no_verdict(tmp_path: Path) -> None:
    async with serving(tmp_path, sessions_max=1) as (core, stub, _):
        await core.sessions.open("s", profile="python", limits={}, ttl_s=0, owner="another")
        with pytest.raises(Overloaded):
            await judged(stub, ADD)


async def test_judgments_beyond_the_queue_are_refused(tmp_path: Path) -> None:
    slow = "import time\ndef add(a, b): time.sleep(0.5); return a + b"
    async with serving(tmp_path, judgments_inflight_max=1, judgments_queued_max=1) as (_, stub, _):
        given = await asyncio.gather(*(judged(stub, ADD, slow) for _ in range(3)), return_exceptions=True)
        assert sum(isinstance(answer, Overloaded) for answer in given) == 1
        assert [outcomes(answer) for answer in given if isinstance(answer, pb.RunTestsResponse)] == [
            ["ACCEPTED"] * 2
        ] * 2


async def test_each_test_has_a_session_of_its_own_unless_shared(tmp_path: Path) -> None:
    counting = "calls = 0\ndef add(a, b):\n    global calls\n    calls += 1\n    return a + b if calls == 1 else 0"
    async with serving(tmp_path) as (core, stub, _):
        assert outcomes(await judged(stub, ADD, counting)) == ["ACCEPTED"] * 2
        assert core.sessions.counts().created == 2
        assert outcomes(await judged(stub, {**ADD, "isolate": False}, counting)) == ["ACCEPTED", "WRONG_ANSWER"]
        assert core.sessions.counts().created == 3


async def test_shared_session_that_exited_is_replaced(tmp_path: Path) -> None:
    dying = "import os\ndef add(a, b):\n    if a == 1: os._exit(0)\n    return a + b"
    async with serving(tmp_path) as (_, stub, _):
        assert outcomes(await judged(stub, {**ADD, "isolate": False}, dying)) == ["RUNTIME_ERROR", "ACCEPTED"]


async def test_first_failure_stops_where_the_manifest_says_so(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, stub, _):
        response = await judged(stub, {**ADD, "stop_at_first_failure": True}, "def add(a, b): return 12")
        assert (outcomes(response), response.num_tests, response.accepted_share) == (["WRONG_ANSWER"], 2, 0.0)


async def test_tests_behind_many_out_of_time_are_not_run(tmp_path: Path) -> None:
    tests = [{"arguments": [n], "expected": 0} for n in range(4)]
    manifest = {"kind": "function", "function": "f", "tests": tests, "limits": {"wall_s": 0.2}, "time_limits_max": 1}
    async with serving(tmp_path) as (core, stub, _):
        response = await judged(stub, manifest, "def f(n):\n    while True: pass")
        assert outcomes(response) == ["TIME_LIMIT"] * 4
        assert core.sessions.counts().created == 1


async def test_candidate_that_does_not_load_is_loaded_once(tmp_path: Path) -> None:
    async with serving(tmp_path) as (core, stub, _):
        response = await judged(stub, ADD, "raise ValueError('no')")
        assert outcomes(response) == ["RUNTIME_ERROR"] * 2
        assert response.verdicts[1].message == "ValueError: no"
        assert core.sessions.counts().created == 1
        assert outcomes(await judged(stub, ADD, path="other.py")) == ["RUNTIME_ERROR"] * 2
        assert outcomes(await judged(stub, ADD, path="../solution.py")) == ["RUNTIME_ERROR"] * 2


async def test_candidate_whose_files_do_not_fit_fails(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, stub, _):
        manifest = {**ADD, "limits": {"disk_bytes": 1 << 16}}
        response = await judged(stub, manifest, GOOD + "\n#" + "x" * (1 << 17))
        assert outcomes(response) == ["RUNTIME_ERROR"] * 2
        assert "cannot write its files" in response.verdicts[0].message


async def test_checker_decides_in_a_session_without_the_candidate(tmp_path: Path) -> None:
    checker = """
import os
def check(given, expected, answer):
    assert not os.path.exists("solution.py"), "the candidate is here"
    if answer == "hang":
        while True: pass
    return (answer ** 2 == given[0], "not a root of the given number")
"""
    manifest = {"kind": "function", "function": "root", "compare": "checker", "tests": [{"arguments": [4], "expected": None}],
                "checker": {"source": checker, "wall_s": 3.0}}  # fmt: skip
    async with serving(tmp_path, grace_s=3.0) as (core, stub, _):
        assert outcomes(await judged(stub, manifest, "def root(x): return -2")) == ["ACCEPTED"]
        wrong = await judged(stub, manifest, "def root(x): return 3")
        assert (outcomes(wrong), wrong.verdicts[0].message) == (["WRONG_ANSWER"], "not a root of the given number")
        for answer in ("'x'", "None", "{}", "'hang'"):
            strange = await judged(stub, manifest, f"def root(x): return {answer}")
            assert outcomes(strange) == ["WRONG_ANSWER"], answer
            assert "could not judge" in strange.verdicts[0].message
        assert core.sessions.counts().live == 0


async def test_checker_that_returns_no_bool_accepts_nothing(tmp_path: Path) -> None:
    manifest = {**ADD, "compare": "checker", "checker": {"source": "def check(given, expected, answer): return answer"}}
    async with serving(tmp_path) as (_, stub, _):
        assert outcomes(await judged(stub, manifest)) == ["WRONG_ANSWER"] * 2


async def test_program_is_judged_by_its_output_and_its_end(tmp_path: Path) -> None:
    manifest = {"kind": "stdio", "tests": [{"stdin": "1 2\n", "stdout": "1 2\n"}], "limits": {"wall_s": 2}}
    programs = {
        "print(input())": "ACCEPTED",
        "import os\nprint(input(), flush=True)\nos._exit(0)": "ACCEPTED",
        "import sys\nprint(input())\nsys.exit()": "ACCEPTED",
        "import threading\nthreading.Thread(target=lambda: print(input())).start()": "ACCEPTED",
        "if __name__ == '__main__': print(open(0).read())": "ACCEPTED",
        "print(input().replace(' ', '  '))": "PRESENTATION_ERROR",
        "print(input()[::-1])": "WRONG_ANSWER",
        "print(input())\nraise SystemExit('no')": "RUNTIME_ERROR",
        "print('x' * 100000)": "OUTPUT_LIMIT",
        "bytes(1 << 32)": "MEMORY_LIMIT",
    }
    async with serving(tmp_path) as (_, stub, _):
        for program, outcome in programs.items():
            assert outcomes(await judged(stub, manifest, program)) == [outcome], program


async def test_cancelled_judgment_leaves_no_session(tmp_path: Path) -> None:
    async with serving(tmp_path) as (core, stub, _):
        task = asyncio.create_task(judged(stub, ADD, "def add(a, b):\n    while True: pass"))
        await until_live(core, 1)
        task.cancel()
        await until_live(core, 0)
        await asyncio.gather(task, return_exceptions=True)


UNIT = """
import math
import unittest

import solution
from solution import LIMIT, Stack, halve, missing, root


def test_values():
    assert root(4) == 2 and math.isclose(root(2), 2 ** 0.5)
    assert solution.pair(1, b=2) == (1, {2: {3}})
    assert LIMIT == 10


def test_missing():
    missing()


class TestStack(unittest.TestCase):
    def setUp(self):
        self.stack = Stack()

    def test_push_and_pop(self):
        for n in range(3):
            self.stack.push(n)
        self.assertEqual((len(self.stack), self.stack.pop(), list(self.stack), self.stack.name), (3, 2, [0, 1], "s"))
        self.assertIn(0, self.stack)

    def test_empty(self):
        with self.assertRaises(IndexError):
            self.stack.pop()


class TestHalve:
    def setup_method(self):
        self.even = 4

    def test_even(self):
        assert halve(self.even) == 2

    def test_odd(self):
        try:
            halve(3)
        except ValueError:
            return
        raise AssertionError("expected ValueError, the answer is 42")
"""

UNIT_SOLUTION = """
class OddError(ValueError): pass
LIMIT = 10
def root(x): return x ** 0.5
def pair(a, b): return (a, {b: {3}})
def halve(x):
    if x % 2: raise OddError(x)
    return x // 2
class Stack:
    def __init__(self): self.items, self.name = [], "s"
    def push(self, item): self.items.append(item)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __contains__(self, item): return item in self.items
"""


async def test_hidden_unit_tests_call_the_candidate_from_their_own_jail(tmp_path: Path) -> None:
    manifest = {"kind": "unit", "source": UNIT}
    names = ["test_values", "test_missing", "TestStack.test_push_and_pop", "TestStack.test_empty", "TestHalve.test_even",
             "TestHalve.test_odd"]  # fmt: skip
    async with serving(tmp_path) as (core, stub, _):
        for isolate in (True, False):
            response = await judged(stub, {**manifest, "isolate": isolate}, UNIT_SOLUTION)
            assert [verdict.name for verdict in response.verdicts] == names
            assert [o for o in outcomes(response) if o != "ACCEPTED"] == ["RUNTIME_ERROR"], response
            assert response.verdicts[1].message.startswith("AttributeError")
        wrong = await judged(
            stub,
            {**manifest, "tests": [{"name": "TestHalve.test_odd"}]},
            "def halve(x): return x / 2\nroot = Stack = LIMIT = None",
        )
        assert outcomes(wrong) == ["WRONG_ANSWER"]
        assert "42" not in str(wrong)
        assert core.sessions.counts().live == 0


async def test_hidden_unit_tests_that_do_not_load_are_no_verdict(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, stub, _):
        for source in ("def test_x(:", "import no_such_module\ndef test_x(): pass"):
            with pytest.raises((BrokenOracle, InvalidInput), match="SyntaxError|not valid Python|no_such_module"):
                await judged(stub, {"kind": "unit", "source": source}, GOOD)


async def test_queries_are_judged_by_their_rows_on_each_database(tmp_path: Path) -> None:
    make = "create table p(name, age real); insert into p values "
    tests = [
        {"setup": make + "('a', 1), ('b', 2), ('c', 3)"},
        {"setup": make + "('d', 9), ('e', 0)", "rows": [["d", 9]]},
    ]
    manifest = {"kind": "sql", "gold": "select name, age from p where age > 1", "tests": tests}
    queries = {
        "select name, age from p where age > 1 order by age desc": ["ACCEPTED"] * 2,
        "select * from p where age between 2 and 3": ["ACCEPTED", "WRONG_ANSWER"],
        "select name from p where age > 1": ["WRONG_ANSWER"] * 2,
        "select nothing from p": ["RUNTIME_ERROR"] * 2,
        "delete from p": ["RUNTIME_ERROR"] * 2,
        "attach '/session/x' as x": ["RUNTIME_ERROR"] * 2,
        "pragma writable_schema = 1": ["RUNTIME_ERROR"] * 2,
        "select 'AC'; drop table p": ["RUNTIME_ERROR"] * 2,
    }
    async with serving(tmp_path) as (core, stub, _):
        for query, verdicts in queries.items():
            assert outcomes(await judged(stub, manifest, query, path="query.sql")) == verdicts, query
        ordered = {**manifest, "ordered": True}
        assert outcomes(await judged(stub, ordered, next(iter(queries)), path="query.sql")) == [
            "WRONG_ANSWER",
            "ACCEPTED",
        ]
        nothing = {"kind": "sql", "tests": [{"setup": make + "('a', 1)", "rows": []}]}
        for query in ("", " ;", "-- select", "/* select 1 */"):
            assert outcomes(await judged(stub, nothing, query, path="query.sql")) == ["RUNTIME_ERROR"], query
        assert outcomes(await judged(stub, nothing, "select 1 where 0", path="query.sql")) == ["ACCEPTED"]
        loose = {**manifest, "columns": "any", "duplicates": False}
        permuted = "select age, name from p where age > 1 union all select age, name from p where age > 1"
        assert outcomes(await judged(stub, loose, permuted, path="query.sql")) == ["ACCEPTED"] * 2
        with pytest.raises(BrokenOracle, match="no such table"):
            await judged(stub, {**manifest, "gold": "select 1 from q"}, "select 1", path="query.sql")
        assert core.sessions.counts().live == 0

"""Run a quick part of the attacks, check the document's table, and prove that a breach would be detected."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from rollmesh.sandbox_runtime.program import Program

from . import suite, table
from .arena import arena
from .attack import Attack, Verdict, mismatch
from .catalog import FAMILIES, all_attacks, playable
from .controls import STILL_RUNNING, Controls, possible
from .neighbor import CALL_S
from .online import ONLINE
from .world import world

QUICK = [attack for attack in all_attacks() if attack.quick and playable(attack)]


async def test_quick_attacks_are_contained(tmp_path: Path) -> None:
    with world() as around:
        async with arena(tmp_path, around, egress=True) as running:
            scores = [await running.play(attack) for attack in QUICK]
    assert {score.name: score.faults for score in scores if not score.contained} == {}


@pytest.mark.skipif(not suite.can_step_down(), reason="already an ordinary user, or no interpreter for one")
def test_attacks_on_what_an_ordinary_users_sessions_share_are_contained() -> None:
    report = suite.play_as_ordinary_user(["process group"])
    assert len(report.rows) >= 4
    assert {row.name: row.faults for row in report.rows if row.faults} == {}


@pytest.mark.skipif(not possible(), reason="controls need root")
def test_attacks_do_harm_without_isolation() -> None:
    sampled = [attack for attack in QUICK if attack.free][::4]
    with world() as around:
        controls = Controls(around)
        try:
            shown = {attack.name: controls.play(attack) for attack in sampled}
        finally:
            controls.close()
    assert {name: why for name, why in shown.items() if why} == {}


def test_each_attack_has_a_unique_name_and_differs_from_its_control() -> None:
    assert [name for name, count in Counter(attack.name for attack in all_attacks()).items() if count > 1] == []
    assert all(family.attacks for family in FAMILIES)
    assert {a.name for a in all_attacks() if a.free and a.held == a.free} <= {"kill everything, from pid 1"}


def test_document_lists_exactly_the_attacks_that_exist() -> None:
    named = table.names_in(table.DOCS.read_text())
    assert named == [attack.name for attack in all_attacks()], "run `make suite NAME=attack`"


# The checks themselves can fail ---------------------------------------------------------------------------------------


async def test_an_attack_that_succeeds_is_seen(tmp_path: Path) -> None:
    attack = Attack(name="x", verdict=Verdict.REFUSED, source="probe('x', lambda: 1)", held=["x {no}"])
    with world() as around:
        async with arena(tmp_path, around) as running:
            score = await running.play(attack)
    assert score.faults == ["said 'x got 1', not 'x {no}'"]


async def test_an_attack_that_says_nothing_is_seen(tmp_path: Path) -> None:
    attack = Attack(name="x", verdict=Verdict.REFUSED, source="pass", held=["x {no}"])
    with world() as around:
        async with arena(tmp_path, around) as running:
            score = await running.play(attack)
    assert not score.contained


async def test_harm_to_host_neighbor_and_service_is_seen(tmp_path: Path) -> None:
    attack = Attack(name="x", verdict=Verdict.HARMLESS, source="print('x')", held=["x"])
    with world() as around:
        facts = around.facts()
        async with arena(tmp_path, around) as running:

            async def harm(_: object) -> None:
                os.truncate(str(facts["CANARY"]), 0)
                os.unlink(str(facts["SHARED"]))
                victim = int(str(facts["VICTIM_PID"]))
                os.kill(victim, signal.SIGSTOP)
                await asyncio.to_thread(
                    os.waitid, os.P_PID, victim, os.WSTOPPED | os.WNOWAIT
                )  # it stops when it is next scheduled
                await running.engine.run("neighbor", Program(code="signals.append(15)"), CALL_S)

            object.__setattr__(attack, "drive", harm)
            score = await running.play(attack)
            os.kill(int(str(facts["VICTIM_PID"])), signal.SIGCONT)
    faults = " ".join(score.faults)
    for word in ("files changed", "shared_memory changed", "victim_alive changed", "neighbor:"):
        assert word in faults, faults


async def test_what_a_policy_lets_through_to_a_forbidden_server_is_seen(tmp_path: Path) -> None:
    source = "ask('loopback', 'http://loopback.public.test:%d/' % FORBIDDEN_PORT)"
    held = ["loopback refused by address"]
    inside = Attack(name="x", verdict=Verdict.REFUSED, source=source, held=held, profile=ONLINE)
    with world() as around:
        async with arena(tmp_path, around, egress=True, leaky=True) as running:
            score = await running.play(inside)
    assert any(fault.startswith("outside: ") and "the forbidden port: GET /" in fault for fault in score.faults)
    assert "said 'loopback got 404 nothing here', not 'loopback refused by address'" in score.faults


async def test_a_process_left_and_a_lost_neighbor_are_seen(tmp_path: Path) -> None:
    left: list[subprocess.Popen[bytes]] = []
    with world() as around:
        async with arena(tmp_path, around) as running:

            async def leave(_: object) -> None:
                left.append(_waiting_process())

            async def kill(_: object) -> None:
                await running.engine.end("neighbor")

            scores = [
                await running.play(Attack(name="x", verdict=Verdict.TIME, source="", drive=drive))
                for drive in (leave, kill)
            ]
    left[0].communicate(b"\n")
    assert "1 processes were left" in scores[0].faults
    assert scores[1].faults[0].startswith("the neighbor was lost")


def _waiting_process() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def test_lines_are_compared_whole_and_counted() -> None:
    assert mismatch("a EPERM\nb got 1", ["a {no}", "b got 1"]) == ""
    assert mismatch("a EPERM\nb got 1", ["a {no}"]) != ""
    assert mismatch("a EINVAL", ["a {no}"]) != ""
    assert mismatch("", ["a {no}"]) != ""


@pytest.mark.skipif(not possible(), reason="controls need root")
def test_a_control_is_bounded_in_time() -> None:
    with world() as around:
        controls = Controls(around)
        try:
            spinning = Attack(name="x", verdict=Verdict.TIME, source="while True: time.sleep(1)", free=[STILL_RUNNING])
            assert controls.play(spinning) == ""
        finally:
            controls.close()

"""When a step waits for further requests, with a clock that the tests set."""

import pytest

from rollmesh.services.inference.engines.torch.step_pace import ROWS_FULL, SESSIONS_S, StepPace

HOLD_S = 0.005


def busy_pace(num: int = 80, *, hold_s: float = HOLD_S, slots_max: int = 128) -> StepPace:
    """Return a pace after `num` requests of as many sessions, one per millisecond, the last at 1 s, where a step
    ends."""
    pace = StepPace(hold_s, slots_max)
    for index in range(num):
        pace.arrived(f"s{index}", 1.0 - (num - 1 - index) * 1e-3)
    pace.finished(1.0, 0.0)
    return pace


def test_few_sequences_wait_until_the_interval_has_passed() -> None:
    pace = busy_pace()
    assert pace.wait_s(3, 1.001) == pytest.approx(0.004)
    assert pace.wait_s(3, 1.005) == 0.0
    assert pace.wait_s(3, 1.02) == 0.0


def test_cpu_time_of_the_step_before_is_part_of_the_interval() -> None:
    pace = busy_pace()
    pace.finished(1.0, 0.002)
    assert pace.wait_s(3, 1.0) == pytest.approx(0.003)
    pace.finished(1.0, 0.008)
    assert pace.wait_s(3, 1.0) == 0.0, "a large model runs without a hold"


def test_zero_turns_it_off() -> None:
    assert busy_pace(hold_s=0.0).wait_s(1, 1.0) == 0.0


@pytest.mark.parametrize(("slots_max", "full"), [(128, ROWS_FULL), (8, 8)])
def test_full_batch_is_not_held(slots_max: int, full: int) -> None:
    pace = busy_pace(140, slots_max=slots_max)
    assert pace.wait_s(full, 1.001) == 0.0
    assert pace.wait_s(full - 1, 1.001) > 0.0
    assert pace.rows_wanted(1.001) == full


def test_step_is_not_held_when_requests_have_stopped_arriving() -> None:
    pace = busy_pace(100)
    pace.finished(1.4, 0.0)
    assert pace.rows_wanted(1.4) > 1, "their sessions are still remembered"
    assert pace.wait_s(1, 1.4) == 0.0


def test_client_that_waits_for_each_answer_is_never_held() -> None:
    pace = StepPace(HOLD_S, 128)
    for index in range(1000):  # one request per millisecond, each with a separate step
        now_s = index * 1e-3
        pace.arrived("one", now_s)
        assert pace.wait_s(1, now_s) == 0.0
        pace.finished(now_s, 0.0)


@pytest.mark.parametrize("sessions", ["abcdefgh", "abcd"])
def test_closed_loop_of_clients_is_held_only_while_more_than_half_of_them_can_send(sessions: str) -> None:
    pace = StepPace(HOLD_S, 128)
    for index in range(200):
        pace.arrived(sessions[index % len(sessions)], index * 1e-3)
    pace.finished(0.2, 0.0)
    assert pace.wait_s(len(sessions) // 2, 0.2) == 0.0
    assert pace.wait_s(len(sessions) // 2 - 1, 0.2) == pytest.approx(HOLD_S)


def test_requests_without_a_session_count_as_one_client() -> None:
    pace = StepPace(HOLD_S, 128)
    for index in range(100):
        pace.arrived("", index * 1e-3)
    pace.finished(0.1, 0.0)
    assert pace.wait_s(1, 0.1) == 0.0


def test_sessions_are_forgotten_after_a_while() -> None:
    pace = busy_pace(40)
    assert pace.rows_wanted(1.0) == 20
    for session in ("s0", "s1", "s2"):
        pace.arrived(session, 1.3)
    assert pace.rows_wanted(1.0 + SESSIONS_S + 0.001) == 1


def test_first_request_after_a_pause_starts_at_once() -> None:
    pace = busy_pace(40)
    pace.arrived("new", 3.0)
    assert pace.wait_s(1, 3.0) == 0.0

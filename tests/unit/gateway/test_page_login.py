"""The login of the page: tokens, tickets that are valid once, and sessions that outlive the gateway."""

from __future__ import annotations

import pytest

from rollmesh.services.gateway.page.login import TICKET_S, PageLogin, new_ticket
from rollmesh.shared.clock import ManualClock

TOKEN = "a token of the mesh"


def login(clock: ManualClock, token: str = TOKEN) -> PageLogin:
    return PageLogin(token, session_s=100.0, clock=clock)


def test_the_token_is_admitted_as_a_bearer_and_nothing_else_is() -> None:
    checks = login(ManualClock())
    assert checks.admits(f"Bearer {TOKEN}", "")
    for wrong in ("Bearer ", "Bearer wrong", TOKEN, f"bearer {TOKEN}", f"Bearer {TOKEN} ", "Bearer \udcff", "é"):
        assert not checks.admits(wrong.encode(errors="replace").decode(), "")
    assert not checks.admits("", "")


def test_a_wrong_header_is_not_replaced_by_a_session() -> None:
    checks = login(ManualClock())
    session = checks.open_with_token(TOKEN)
    assert session is not None
    assert checks.admits("", session)
    assert not checks.admits("Bearer wrong", session)


def test_a_session_ends_with_its_time_and_is_known_to_a_restarted_gateway() -> None:
    clock = ManualClock()
    session = login(clock).open_with_token(TOKEN)
    assert session is not None
    assert login(clock).admits("", session)
    assert login(clock).left_s(session) == 100.0
    clock.advance(101.0)
    assert not login(clock).admits("", session)
    assert login(clock).left_s(session) == 0.0


def test_a_ticket_is_valid_once_and_for_a_limited_time() -> None:
    clock = ManualClock()
    checks, ticket = login(clock), new_ticket(TOKEN, clock=clock)
    assert checks.open_with_ticket(ticket) is not None
    assert checks.open_with_ticket(ticket) is None, "it was used"
    late = new_ticket(TOKEN, clock=clock)
    clock.advance(TICKET_S + 1)
    assert checks.open_with_ticket(late) is None


def test_a_ticket_is_no_session_and_a_session_no_ticket() -> None:
    clock = ManualClock()
    checks = login(clock)
    session = checks.open_with_token(TOKEN)
    assert session is not None
    assert not checks.admits("", new_ticket(TOKEN, clock=clock))
    assert checks.open_with_ticket(session) is None


@pytest.mark.parametrize(
    "change", [lambda t: t[:-1] + ("0" if t[-1] != "0" else "1"), lambda t: "9" + t, lambda t: t.upper()]
)
def test_a_changed_ticket_is_rejected(change: object) -> None:
    clock = ManualClock()
    assert callable(change)
    assert login(clock).open_with_ticket(change(new_ticket(TOKEN, clock=clock))) is None


def test_a_new_token_invalidates_sessions_and_has_another_cookie() -> None:
    clock = ManualClock()
    session = login(clock).open_with_token(TOKEN)
    other = login(clock, "another token")
    assert session is not None
    assert not other.admits("", session)
    assert other.cookie != login(clock).cookie

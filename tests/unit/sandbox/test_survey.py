"""What a service does about walls that stand, don't stand, or were given up; on real answers of the probe where it runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

import pytest

from rollmesh.sandbox_runtime import mechanisms, probe
from rollmesh.services.sandbox import capability_probe
from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.shared.errors import SandboxFailed


def standing_but(monkeypatch: pytest.MonkeyPatch, missing: Mapping[str, str]) -> None:
    """A host on which all walls stand but these."""
    found = dict.fromkeys(mechanisms.WALLS, "") | dict(missing)
    monkeypatch.setattr(capability_probe, "_tried", lambda _python, _user: found)
    monkeypatch.setattr(
        capability_probe, "_groups", lambda _config, _user: {name: found[name] for name in mechanisms.CGROUPS}
    )


def test_a_missing_required_wall_is_named_with_its_loss_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    standing_but(monkeypatch, {mechanisms.NETWORK_NAMESPACE: "[Errno 1] refused"})
    with pytest.raises(SandboxFailed) as raised:
        capability_probe.plan(SandboxConfig())
    for part in (
        "'network namespace'",
        "refused",
        "only seccomp",
        "CAP_SYS_ADMIN",
        "sandbox.without=[network namespace]",
    ):
        assert part in raised.value.message


def test_a_wall_that_others_rest_on_has_no_way_round(monkeypatch: pytest.MonkeyPatch) -> None:
    standing_but(monkeypatch, {mechanisms.PID_NAMESPACE: "refused"})
    with pytest.raises(SandboxFailed, match="CAP_SYS_ADMIN") as raised:
        capability_probe.plan(SandboxConfig())
    assert "sandbox.without" not in raised.value.message
    with pytest.raises(ValueError, match="can't be given up"):
        SandboxConfig(without=(mechanisms.PID_NAMESPACE,))


def test_an_unknown_wall_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match="unknown wall 'secomp'; those that can be given up: .*seccomp"):
        SandboxConfig(without=("secomp",))


def test_a_wall_given_up_is_logged_and_not_raised(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    standing_but(monkeypatch, {mechanisms.SECCOMP: "no libseccomp"})
    with caplog.at_level(logging.WARNING):
        blueprint = capability_probe.plan(SandboxConfig(without=(mechanisms.SECCOMP, mechanisms.LANDLOCK)))
    assert not {mechanisms.SECCOMP, mechanisms.LANDLOCK} & blueprint.walls
    assert blueprint.seccomp_filter == b""
    assert "gives up seccomp: the kernel's whole surface lies open" in caplog.text


def test_optional_walls_are_raised_where_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    standing_but(monkeypatch, {mechanisms.MEMORY_CGROUP: "not writable"})
    raised = capability_probe.plan(SandboxConfig()).walls
    assert mechanisms.LANDLOCK in raised
    assert mechanisms.MEMORY_CGROUP not in raised


def test_blueprint_travels_unchanged() -> None:
    made = mechanisms.IsolationPlan(walls=frozenset({mechanisms.SECCOMP}), seccomp_filter=bytes(range(8)))
    assert mechanisms.blueprint_from_message(made.as_message()) == made


def test_the_probe_answers_for_every_wall_of_the_kernel() -> None:
    found = {standing.wall.name: standing for standing in capability_probe.survey(SandboxConfig())}
    moot = mechanisms.USER_NAMESPACE if os.geteuid() == 0 else mechanisms.OWN_UID
    assert set(found) == set(mechanisms.WALLS) - {moot}
    assert found[mechanisms.NO_NEW_PRIVILEGES].stands
    assert found[mechanisms.RLIMITS].stands


def test_a_probe_that_fails_any_way_is_a_wall_that_does_not_stand() -> None:
    def refused() -> None:
        raise PermissionError("no")

    assert "no" in probe._attempt(refused)
    assert "broke off" in probe._attempt(lambda: os._exit(0))
    assert "status 9" in probe._attempt(lambda: os.kill(os.getpid(), 9))
    assert probe._attempt(lambda: None) == ""

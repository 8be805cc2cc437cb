"""How a service handles isolation mechanisms that are available, missing or disabled, with the kernel's own answers
where the probe runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

import pytest

from rollmesh.sandbox_runtime import mechanisms, probe
from rollmesh.services.sandbox import capability_probe
from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.shared.errors import SandboxFailed


def missing_on_host(monkeypatch: pytest.MonkeyPatch, missing: Mapping[str, str]) -> None:
    """Simulate a host that has all isolation mechanisms but these."""
    found = dict.fromkeys(mechanisms.MECHANISMS, "") | dict(missing)
    monkeypatch.setattr(capability_probe, "_probe_kernel", lambda _python, _user: found)
    monkeypatch.setattr(
        capability_probe, "_probe_cgroups", lambda _config, _user: {name: found[name] for name in mechanisms.CGROUPS}
    )


def test_the_error_of_a_missing_required_mechanism_names_consequence_and_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing_on_host(monkeypatch, {mechanisms.NETWORK_NAMESPACE: "[Errno 1] refused"})
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


def test_a_mechanism_that_others_depend_on_cannot_be_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    missing_on_host(monkeypatch, {mechanisms.PID_NAMESPACE: "refused"})
    with pytest.raises(SandboxFailed, match="CAP_SYS_ADMIN") as raised:
        capability_probe.plan(SandboxConfig())
    assert "sandbox.without" not in raised.value.message
    with pytest.raises(ValueError, match="cannot be disabled"):
        SandboxConfig(without=(mechanisms.PID_NAMESPACE,))


def test_an_unknown_mechanism_is_rejected_with_the_known_names() -> None:
    with pytest.raises(
        ValueError, match="unknown mechanism 'secomp'; the mechanisms that can be disabled are .*seccomp"
    ):
        SandboxConfig(without=("secomp",))


def test_a_disabled_mechanism_is_logged_and_not_enforced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    missing_on_host(monkeypatch, {mechanisms.SECCOMP: "no libseccomp"})
    with caplog.at_level(logging.WARNING):
        plan = capability_probe.plan(SandboxConfig(without=(mechanisms.SECCOMP, mechanisms.LANDLOCK)))
    assert not {mechanisms.SECCOMP, mechanisms.LANDLOCK} & plan.mechanisms
    assert plan.seccomp_filter == b""
    assert "disables seccomp: the code can make every system call" in caplog.text


def test_optional_mechanisms_are_enforced_where_they_are_available(monkeypatch: pytest.MonkeyPatch) -> None:
    missing_on_host(monkeypatch, {mechanisms.MEMORY_CGROUP: "not writable"})
    enforced = capability_probe.plan(SandboxConfig()).mechanisms
    assert mechanisms.LANDLOCK in enforced
    assert mechanisms.MEMORY_CGROUP not in enforced


def test_an_isolation_plan_survives_encoding() -> None:
    made = mechanisms.IsolationPlan(mechanisms=frozenset({mechanisms.SECCOMP}), seccomp_filter=bytes(range(8)))
    assert mechanisms.plan_from_message(made.as_message()) == made


def test_the_probe_reports_every_mechanism_of_the_kernel() -> None:
    found = {status.mechanism.name: status for status in capability_probe.probe_host(SandboxConfig())}
    irrelevant = mechanisms.USER_NAMESPACE if os.geteuid() == 0 else mechanisms.OWN_UID
    assert set(found) == set(mechanisms.MECHANISMS) - {irrelevant}
    assert found[mechanisms.NO_NEW_PRIVILEGES].available
    assert found[mechanisms.RLIMITS].available


def test_a_probe_that_fails_in_any_way_reports_an_error() -> None:
    def refused() -> None:
        raise PermissionError("no")

    assert "no" in probe._probe(refused)
    assert "failed" in probe._probe(lambda: os._exit(0))
    assert "status 9" in probe._probe(lambda: os.kill(os.getpid(), 9))
    assert probe._probe(lambda: None) == ""

"""`rollmesh doctor` on this host: a finding per check, and an exit code for what is required."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from rollmesh.app.checks import host_checks as doctor
from rollmesh.cli.__main__ import app
from rollmesh.sandbox_runtime import mechanisms


def test_findings_of_this_host_as_json() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    said = json.loads(done.stdout)
    found = {finding["name"]: finding for finding in said["findings"]}
    assert (done.exit_code == 0) == said["fit"]
    assert {
        mechanisms.SECCOMP,
        mechanisms.MOUNT_NAMESPACE,
        "nats-server",
        "torch",
        "libseccomp",
        "gcc",
        "CUDA",
        "disk",
        "openssl",
        "extra telemetry",
    } <= set(found)
    assert found[mechanisms.SECCOMP]["required"]
    assert found["driver jail"]["holds"] == said["fit"]
    assert {"driver landlock", "driver none"} <= set(found)
    assert all(finding["remedy"] for finding in said["findings"] if not finding["holds"])


def test_a_missing_required_finding_is_exit_code_1_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = doctor.HostFinding(
        name="moat", holds=False, detail="dry", guarantee="wolves", remedy="add water", required=True
    )
    monkeypatch.setattr(doctor, "CHECKS", (lambda _asked: [missing],))
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "MISSING" in done.stdout
    assert "moat: add water" in done.stdout


def test_an_absent_optional_finding_is_no_failure() -> None:
    assert doctor.is_fit([doctor.HostFinding(name="x", holds=False)])


def test_an_unknown_user_is_reported_once() -> None:
    done = CliRunner().invoke(app, ["doctor", "--user", "no-such-user"])
    assert done.exit_code == 2
    assert "--user" in done.output
    assert "Traceback" not in done.output

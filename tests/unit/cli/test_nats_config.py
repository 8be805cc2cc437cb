"""`rollmesh nats-config`: configurations that nats-server accepts, private logins that are kept, and mistakes with
their remedies."""

from __future__ import annotations

import json
import stat
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from rollmesh.app.certificates import make_certificates
from rollmesh.cli.__main__ import app
from rollmesh.shared.bus.embedded_server import find_binary
from rollmesh.shared.bus.login import BusLogin
from rollmesh.shared.bus.permissions import PUBLISH

THREE = ("--server", "nats-0.nats", "--server", "nats-1.nats", "--server", "nats-2.nats")


def nats_config(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["nats-config", *map(str, arguments)])


def test_every_server_of_a_cluster_gets_a_configuration_that_nats_server_accepts(tmp_path: Path) -> None:
    make_certificates(tmp_path / "tls")
    done = nats_config(
        "--out", tmp_path / "nats", "--mesh", "lab", "--mesh", "other", "--tls", tmp_path / "tls", "--store", tmp_path / "store", *THREE, "--json"
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    files = json.loads(done.stdout)
    assert files["url"] == "tls://nats-0.nats:4222,tls://nats-1.nats:4222,tls://nats-2.nats:4222"
    assert files["num_replicas"] == len(files["servers"]) == 3
    for path in files["servers"]:
        subprocess.run([find_binary(), "-t", "-c", path], check=True, capture_output=True)
        assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
    tree = json.loads(Path(files["servers"][1]).read_text())
    assert tree["server_name"] == "nats-1"
    assert tree["lame_duck_duration"] == "30s", "it stops within a grace period of 60 s"
    assert tree["accounts"].keys() == {"lab", "lab-rollout", "other", "other-rollout", "SYS"}
    assert tree["tls"]["verify"] is tree["cluster"]["tls"]["verify"] is True
    users = {
        user["user"]: user["password"]
        for account in ("lab", "lab-rollout")
        for user in tree["accounts"][account]["users"]
    }
    for role in PUBLISH:
        login = BusLogin.read(Path(files["logins"]["lab"]), role=role)
        assert login == BusLogin.read(tmp_path / "nats/logins/lab" / role)
        assert users[f"lab-{role}"] == login.password
    assert len({*users.values()}) == len(PUBLISH)


def test_a_repeated_call_keeps_the_passwords_and_adds_what_is_new(tmp_path: Path) -> None:
    first = nats_config("--out", tmp_path, "--server", "a=127.0.0.1")
    assert first.exit_code == 0, first.output
    before = (tmp_path / "logins/mesh/all").read_text()
    assert nats_config("--out", tmp_path, "--server", "a=127.0.0.1", "--mesh", "mesh", "--mesh", "lab").exit_code == 0
    assert (tmp_path / "logins/mesh/all").read_text() == before
    tree = json.loads((tmp_path / "servers/a.conf").read_text())
    assert tree["accounts"].keys() == {"mesh", "mesh-rollout", "lab", "lab-rollout", "SYS"}
    assert "cluster" not in tree


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--server", "a=127.0.0.1", "--server", "b=127.0.0.2"), "--server must be given 1, 3 or 5 times, got 2"),
        (THREE, "--tls must name the folder with the certificates on the servers, because nats-0.nats"),
        (("--server", "a=127.0.0.1", "--mesh", "SYS"), "--mesh must be 1 to 64 letters"),
        (("--server", "a=127.0.0.1:4222/x"), "--server must be HOST or NAME=HOST without port"),
        (("--server", "a=127.0.0.1", "--server", "a=127.0.0.2", "--server", "c=127.0.0.3"), "two servers have the name a"),
        (("--server", "a=127.0.0.1", "--server", "b=127.0.0.1", "--server", "c=127.0.0.3"), "two servers have the host 127.0.0.1"),
    ],
)  # fmt: skip
def test_a_plan_that_cannot_work_is_rejected(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    done = nats_config("--out", tmp_path, *arguments)
    assert done.exit_code == 2
    assert said in done.output
    assert not (tmp_path / "servers").exists()


def test_a_damaged_login_is_reported(tmp_path: Path) -> None:
    (tmp_path / "logins/mesh").mkdir(parents=True)
    (tmp_path / "logins/mesh/data").write_text("mesh-rollout:x\n")
    done = nats_config("--out", tmp_path, "--server", "a=127.0.0.1")
    assert done.exit_code == 2
    assert "must be one line mesh-data:PASSWORD; remove the file" in done.output

"""The sections `security`, `network` and `bus`: nothing beyond loopback without certificates and a token, and no secret
in a config."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from rollmesh.app.certificates import make_certificates
from rollmesh.app.config import TrainConfig
from rollmesh.mesh import MeshConfig
from rollmesh.mesh.mesh import Mesh
from rollmesh.mesh.run_layout import open_layout
from rollmesh.mesh.supervisor import Supervisor
from rollmesh.shared.bus.login import BusLogin
from rollmesh.shared.config.loader import config_from_dict, to_yaml
from rollmesh.shared.domain.ids import new_secret
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.rpc.server import ServerConfig

TLS = {"ca": "ca.pem", "certificate": "rollmesh.pem", "key": "rollmesh.key"}
ALL = {**TLS, "token_file": "token"}
EVERYWHERE = {"host": "0.0.0.0", "advertise": "mesh-a"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    make_certificates(folder, hosts=["mesh-a"])
    return folder


@pytest.mark.parametrize("kind", [MeshConfig, TrainConfig])
@pytest.mark.parametrize(
    ("security", "said"),
    [
        ({}, "ca, certificate, key and token_file"),
        ({"token_file": "token"}, "ca, certificate, key"),
        (TLS, "token_file"),
    ],
)
@pytest.mark.parametrize(
    "exposed",
    [
        {"network": EVERYWHERE},
        {"network": {"host": "10.0.0.1"}},
        {"network": {"host": "mesh-a"}},
        {"gateway": {"server": {"address": "10.0.0.1:7000"}}},
        {"inference": {"server": {"address": "[::]:0", "advertise": "mesh-a"}}},
    ],
)
def test_beyond_loopback_needs_certificates_and_a_token(
    kind: type, security: dict[str, str], said: str, exposed: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=rf"`security` must name {said}: .*rollmesh certs"):
        config_from_dict(kind, {"security": security, **exposed})
    config_from_dict(kind, {"security": ALL, **exposed})


def test_tls_takes_three_files() -> None:
    with pytest.raises(ConfigError, match=r"security\.key` must name a file, because TLS needs"):
        config_from_dict(MeshConfig, {"security": {"ca": "a", "certificate": "b"}})


def test_every_interface_needs_a_host_to_tell() -> None:
    with pytest.raises(ConfigError, match=r"network\.advertise` must name"):
        config_from_dict(MeshConfig, {"security": ALL, "network": {"host": "0.0.0.0"}})


def test_by_default_everything_is_on_loopback_with_a_random_private_token(tmp_path: Path) -> None:
    first = open_layout(MeshConfig(), run_dir=tmp_path / "a", base_dir=tmp_path)
    second = open_layout(MeshConfig(), run_dir=tmp_path / "b", base_dir=tmp_path)
    assert first.access.token != second.access.token
    assert first.access.tls is None
    assert all(a.startswith("127.0.0.1:") for a in (first.coordinator, first.gateway, first.depot))
    assert (tmp_path / "a" / "token").stat().st_mode & 0o777 == 0o600


def test_what_listens_everywhere_tells_the_advertised_host_and_keeps_its_ports(tmp_path: Path, files: Path) -> None:
    config = config_from_dict(
        MeshConfig,
        {"security": ALL, "network": EVERYWHERE, "gateway": {"server": {"address": "127.0.0.1:7000"}}},
    )
    layout = open_layout(config, run_dir=tmp_path / "run", base_dir=files)
    assert layout.coordinator.startswith("mesh-a:")
    assert layout.gateway == "127.0.0.1:7000"
    served = layout.served_at(layout.coordinator, config.coordinator.server)
    assert served.address == layout.coordinator.replace("mesh-a", "0.0.0.0")
    assert served.advertise == "mesh-a"
    assert layout.served() == ServerConfig(address="0.0.0.0:0", advertise="mesh-a")
    assert layout.bus_server().known_url() == ""
    moved = config_from_dict(MeshConfig, {"security": ALL, "network": {"host": "0.0.0.0", "advertise": "localhost"}})
    again = open_layout(moved, run_dir=tmp_path / "run", base_dir=files)
    assert again.coordinator == layout.coordinator.replace("mesh-a", "localhost")
    assert not (tmp_path / "run" / "token").exists()


@pytest.mark.parametrize("name", ["token", "rollmesh.key"])
def test_a_secret_that_others_can_read_is_refused(tmp_path: Path, files: Path, name: str) -> None:
    for path in files.iterdir():
        copy = tmp_path / path.name
        copy.write_bytes(path.read_bytes())
        copy.chmod(0o640 if path.name == name else 0o600)
    with pytest.raises(ConfigError, match=rf"{name}: other users .* \(mode 640\).*chmod 600"):
        open_layout(config_from_dict(MeshConfig, {"security": ALL}), run_dir=tmp_path / "run", base_dir=tmp_path)


@pytest.mark.parametrize("text", ["", "short", "two lines\nof which one may be long enough"])
def test_a_token_that_is_none_is_refused_without_showing_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(0o600)
    config = config_from_dict(MeshConfig, {"security": {"token_file": "token"}})
    with pytest.raises(ConfigError, match="a token is one line of at least 16 ASCII characters") as refused:
        open_layout(config, run_dir=tmp_path / "run", base_dir=tmp_path)
    assert not text or text not in str(refused.value)


def test_a_missing_token_file_is_named(tmp_path: Path) -> None:
    config = config_from_dict(MeshConfig, {"security": {"token_file": "gone"}})
    with pytest.raises(ConfigError, match="gone: cannot read this secret: No such file"):
        open_layout(config, run_dir=tmp_path / "run", base_dir=tmp_path)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nats://me:secret@127.0.0.1:4222", "`bus.url` must not contain a password"),
        ("nats://cluster.example.org:4222", "`bus.url` must be tls://"),
        ("nats://127.0.0.1:4222,nats://10.0.0.1:4222", "`bus.url` must be tls://"),
    ],
)
def test_a_cluster_is_reached_by_tls_and_its_password_stays_in_a_file(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_from_dict(MeshConfig, {"bus": {"url": url}})


def test_a_cluster_s_login_comes_from_its_file_and_is_in_no_config(tmp_path: Path) -> None:
    password = new_secret()
    (tmp_path / "nats-login").write_text(f"me:{password}\n")
    bus = {"url": "nats://127.0.0.1:4222", "login_file": "nats-login"}
    config = config_from_dict(MeshConfig, {"bus": bus})
    layout = open_layout(config, run_dir=tmp_path / "run", base_dir=tmp_path)
    assert layout.bus_login() == BusLogin(user="me", password=password)
    assert password not in to_yaml(config)
    assert password not in repr(layout)
    assert layout.access.token not in repr(layout)
    assert "token" not in json.loads((tmp_path / "run" / "addresses.json").read_text())


def sign(folder: Path, ca: Path, *arguments: str) -> dict[str, str]:
    """Sign another certificate for the key in `folder` with the CA in `ca`, and return the section `security` with
    it."""
    request, signed = folder / "again.csr", folder / "again.pem"
    for command in (
        ["req", "-new", "-key", str(folder / "rollmesh.key"), "-subj", "/CN=again", "-out", str(request)],
        [
            "x509",
            "-req",
            "-in",
            str(request),
            "-CA",
            str(ca / "ca.pem"),
            "-CAkey",
            str(ca / "ca.key"),
            "-CAcreateserial",
        ]
        + [*arguments, "-out", str(signed)],
    ):
        subprocess.run(["openssl", *command], check=True, capture_output=True, timeout=30)
    return {name: str(folder / file) for name, file in {**ALL, "certificate": "again.pem"}.items()}


@pytest.mark.parametrize(
    ("days", "other_ca", "why"),
    [
        ("-1", False, "certificate has expired"),
        ("1", True, "certificate verify failed|unable to get local issuer|signature failure"),
    ],
)
def test_a_certificate_that_no_peer_would_accept_is_rejected_at_the_start(
    tmp_path: Path, files: Path, days: str, other_ca: bool, why: str
) -> None:
    ca = files
    if other_ca:
        make_certificates(ca := tmp_path / "other")
    make_certificates(tmp_path / "own", ca_dir=files)
    security = sign(tmp_path / "own", ca, "-days", days)
    security["ca"], security["token_file"] = str(files / "ca.pem"), str(files / "token")
    config = config_from_dict(MeshConfig, {"security": security})
    with pytest.raises(ConfigError, match=rf"again\.pem: this certificate cannot be used.*({why}).*rollmesh certs"):
        open_layout(config, run_dir=tmp_path / "run", base_dir=tmp_path)


def test_a_certificate_for_servers_only_is_rejected_at_the_start(tmp_path: Path, files: Path) -> None:
    make_certificates(tmp_path / "own", ca_dir=files)
    (tmp_path / "use.cnf").write_text("extendedKeyUsage = serverAuth\n")
    security = sign(tmp_path / "own", files, "-days", "1", "-extfile", str(tmp_path / "use.cnf"))
    security["ca"], security["token_file"] = str(files / "ca.pem"), str(files / "token")
    config = config_from_dict(MeshConfig, {"security": security})
    with pytest.raises(ConfigError, match="this certificate cannot be used"):
        open_layout(config, run_dir=tmp_path / "run", base_dir=tmp_path)


_READ = """
import os, sys
from pathlib import Path
from rollmesh.mesh.security import read_token
os.setgroups([]), os.setgid(10001), os.setuid(10001)
print(len(read_token(Path(sys.argv[1]))))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file of root to another group")
@pytest.mark.parametrize(("mode", "accepted"), [(0o440, True), (0o640, True), (0o660, False), (0o444, False)])
def test_a_group_may_read_the_secret_of_root_as_a_scheduler_mounts_it(mode: int, accepted: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:  # not below pytest's folder, which other users cannot enter
        Path(folder).chmod(0o755)
        token = Path(folder) / "token"
        token.write_text(new_secret())
        os.chown(token, 0, 10001)
        token.chmod(mode)
        command = [sys.executable, "-c", _READ, str(token)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode == 0) == accepted, done.stderr
    assert accepted or "chmod 600" in done.stderr


def test_a_fixed_port_is_for_a_process_that_runs_one_service(tmp_path: Path) -> None:
    config = config_from_dict(MeshConfig, {"network": {"port": 7400}})
    with pytest.raises(ConfigError, match=r"`network\.port` must be 0, got 7400.*one service"):
        Mesh(config, run_dir=tmp_path / "run", services=["coordinator", "gateway"])
    with pytest.raises(ConfigError, match=r"`network\.port` must be 0"):
        Supervisor(config, run_dir=tmp_path / "run")
    layout = Mesh(config, run_dir=tmp_path / "run", services=["coordinator"]).layout
    assert layout.coordinator == "127.0.0.1:7400"


@pytest.mark.parametrize("address", ["0.0.0.0", "0.0.0.0:0", ":7401"])
def test_the_address_of_probes_has_a_fixed_port(address: str) -> None:
    with pytest.raises(ConfigError, match=r"probes` must be IP:PORT with a fixed port"):
        config_from_dict(MeshConfig, {"network": {"probes": address}})


def test_a_gateway_forwards_fewer_calls_than_a_connection_to_the_coordinator_has() -> None:
    tree = {"gateway": {"forwarded_max": 64}, "coordinator": {"server": {"connection_rpcs_max": 64}}}
    with pytest.raises(ConfigError, match=r"`gateway.forwarded_max` must be < .*connection_rpcs_max.* 64, got 64"):
        config_from_dict(MeshConfig, tree)

"""`rollmesh certs`: private files that OpenSSL accepts, for the named hosts; no file is overwritten."""

from __future__ import annotations

import json
import ssl
import stat
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from rollmesh.app.certificates import CA, CA_KEY, CERTIFICATE, KEY, TOKEN
from rollmesh.cli.__main__ import app
from rollmesh.mesh.security import SecurityConfig, open_access
from rollmesh.shared.config.loader import config_from_dict, load_config


def certs(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["certs", *map(str, arguments)])


def test_the_files_are_private_and_belong_together(tmp_path: Path) -> None:
    done = certs("--out", tmp_path / "tls", "--host", "mesh-a.example.org", "--host", "10.1.2.3", "--json")
    assert done.exit_code == 0, done.output
    found = sorted(path.name for path in (tmp_path / "tls").iterdir())
    assert found == sorted([CA, CA_KEY, CERTIFICATE, KEY, TOKEN])
    assert {stat.S_IMODE((tmp_path / "tls" / name).stat().st_mode) for name in found} == {0o600}
    named = json.loads(done.stdout)
    security = config_from_dict(SecurityConfig, {k: named[k] for k in ("ca", "certificate", "key", "token_file")})
    access = open_access(security, base_dir=Path("/nowhere"), run_token=tmp_path / "unused")
    assert access.tls is not None
    assert access.tls.ssl_context().cert_store_stats()["x509_ca"] >= 1
    said = subprocess.run(
        ["openssl", "x509", "-in", tmp_path / "tls" / CERTIFICATE, "-noout", "-ext", "subjectAltName,extendedKeyUsage"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for expected in ("DNS:localhost", "IP Address:127.0.0.1", "DNS:mesh-a.example.org", "IP Address:10.1.2.3"):
        assert expected in said
    assert "Server Authentication" in said
    assert "Client Authentication" in said


def test_the_printed_section_is_a_configuration_and_shows_no_secret(tmp_path: Path) -> None:
    done = certs("--out", tmp_path / "tls")
    (tmp_path / "printed.yaml").write_text(done.stdout.partition("security:\n")[2].replace("  ", ""))
    assert load_config(SecurityConfig, tmp_path / "printed.yaml").token_file == str(tmp_path / "tls" / TOKEN)
    assert (tmp_path / "tls" / TOKEN).read_text().strip() not in done.output


def test_a_second_host_is_signed_by_the_same_ca(tmp_path: Path) -> None:
    assert certs("--out", tmp_path / "a").exit_code == 0
    assert certs("--out", tmp_path / "b", "--ca", tmp_path / "a", "--host", "b.example.org").exit_code == 0
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == sorted([CA, CERTIFICATE, KEY])
    context = ssl.create_default_context(cafile=str(tmp_path / "a" / CA))
    context.load_cert_chain(tmp_path / "b" / CERTIFICATE, tmp_path / "b" / KEY)
    verify = ["openssl", "verify", "-CAfile", str(tmp_path / "a" / CA), str(tmp_path / "b" / CERTIFICATE)]
    assert subprocess.run(verify, capture_output=True, check=False).returncode == 0


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    assert certs("--out", tmp_path).exit_code == 0
    before = (tmp_path / KEY).read_bytes()
    done = certs("--out", tmp_path)
    assert done.exit_code == 2
    assert "exists; choose another --out" in done.stderr
    assert (tmp_path / KEY).read_bytes() == before


def test_without_openssl_the_remedy_is_named_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = certs("--out", tmp_path / "tls")
    assert done.exit_code == 2
    assert "the openssl command is not on the PATH; install it" in done.stderr
    assert list((tmp_path / "tls").iterdir()) == []


@pytest.mark.parametrize("host", ["a b", "x:7000", "DNS:a,IP:1.2.3.4", "a\nb", ""])
def test_a_host_that_is_none_is_refused(tmp_path: Path, host: str) -> None:
    done = certs("--out", tmp_path / "tls", "--host", host)
    assert done.exit_code == 2
    assert "expected a host name or an IP address" in done.stderr
    assert not (tmp_path / "tls").exists()

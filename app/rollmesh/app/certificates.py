"""`rollmesh certs`: a development CA, one certificate for all services of a host, and a token, by the openssl command.

It is meant for private hosts. Where an authority exists, use its certificates instead. Only the owner may read the
files, and an existing file is never overwritten. The key of the CA is needed only to sign for further hosts: keep it
off the hosts that serve.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rollmesh.shared.domain.ids import new_secret
from rollmesh.shared.errors import AlreadyExists, ConfigError

CA, CA_KEY, CERTIFICATE, KEY, TOKEN = "ca.pem", "ca.key", "rollmesh.pem", "rollmesh.key", "token"
ALWAYS = ("localhost", "127.0.0.1", "::1")
"""Names in every certificate, because services of one host use it to call each other too."""
_OPENSSL_S_MAX = 60.0
_HOST_NAME = re.compile(r"(?=.{1,253}$)(\*\.)?[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")

_CA_SECTION = """[req]
distinguished_name = name
prompt = no
x509_extensions = ca
[name]
CN = rollmesh development CA
[ca]
basicConstraints = critical, CA:TRUE, pathlen:0
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
"""
_PARTY_SECTION = """[req]
distinguished_name = name
prompt = no
[name]
CN = rollmesh
[party]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
subjectAltName = {names}
"""


class FilesExist(AlreadyExists):
    """A file exists that would be overwritten."""

    reason = "FILES_EXIST"


class CertificateFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The created files, as the section `security` of a configuration names them, and their hosts."""

    ca: str
    certificate: str
    key: str
    token_file: str
    hosts: list[str]
    valid_days: int


def make_certificates(
    out: Path, *, hosts: Sequence[str] = (), ca_dir: Path | None = None, valid_days: int = 365
) -> CertificateFiles:
    """Create the files in `out`, signed by the CA in `ca_dir` or by a new one.

    Raises FilesExist, and ConfigError for a bad host or if openssl is missing or fails.
    """
    names = [*ALWAYS, *(host for host in hosts if host not in ALWAYS)]
    alternatives = ", ".join(_alternative(name) for name in names)
    made = [CERTIFICATE, KEY, *([] if ca_dir else [CA_KEY, TOKEN]), CA]
    _refuse_overwriting([out / name for name in made])
    if ca_dir is not None:
        _require_ca(ca_dir)
    out.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Create them aside and move them when all exist, because a partial set looks like a complete one.
    with tempfile.TemporaryDirectory(dir=out, prefix=".making-") as folder:
        scratch = Path(folder)
        if ca_dir is None:
            _make_ca(scratch, valid_days)
            _write_private(scratch / TOKEN, new_secret() + "\n")
        else:
            _write_private(scratch / CA, (ca_dir / CA).read_text())
        _sign(scratch, alternatives, valid_days, ca_key=(ca_dir or scratch) / CA_KEY)
        for name in made:
            os.rename(scratch / name, out / name)
    token = out / TOKEN if ca_dir is None else ca_dir / TOKEN
    files = {"ca": out / CA, "certificate": out / CERTIFICATE, "key": out / KEY, "token_file": token}
    resolved = {field: str(path.resolve()) for field, path in files.items()}
    return CertificateFiles(hosts=names, valid_days=valid_days, **resolved)


def _alternative(name: str) -> str:
    try:
        return f"IP:{ipaddress.ip_address(name)}"
    except ValueError:
        pass
    if not _HOST_NAME.fullmatch(name):
        raise ConfigError(f"--host {name}: expected a host name or an IP address, without port")
    return f"DNS:{name}"


def _refuse_overwriting(paths: Sequence[Path]) -> None:
    taken = [path for path in paths if path.exists()]
    if taken:
        raise FilesExist(f"{taken[0]} exists; choose another --out, or remove it", path=taken[0])


def _require_ca(folder: Path) -> None:
    for name in (CA, CA_KEY):
        if not (folder / name).is_file():
            raise ConfigError(
                f"--ca {folder}: the file {name} does not exist; name the --out of an earlier `rollmesh certs`"
            )


def _make_ca(folder: Path, valid_days: int) -> None:
    config = folder / "ca.cnf"
    config.write_text(_CA_SECTION)
    _new_key(folder / CA_KEY)
    command: list[str | Path] = ["req", "-x509", "-new", "-config", config, "-key", folder / CA_KEY, "-sha256"]
    _openssl(*command, "-days", str(valid_days), "-out", folder / CA)


def _sign(folder: Path, alternatives: str, valid_days: int, *, ca_key: Path) -> None:
    config, request = folder / "party.cnf", folder / "party.csr"
    config.write_text(_PARTY_SECTION.format(names=alternatives))
    _new_key(folder / KEY)
    _openssl("req", "-new", "-config", config, "-key", folder / KEY, "-out", request)
    signing: list[str | Path] = [
        "x509",
        "-req",
        "-in",
        request,
        "-CA",
        folder / CA,
        "-CAkey",
        ca_key,
        "-CAcreateserial",
    ]
    serial: list[str | Path] = ["-CAserial", folder / "serial"]
    extensions: list[str | Path] = ["-extfile", config, "-extensions", "party"]
    _openssl(*signing, *serial, *extensions, "-sha256", "-days", str(valid_days), "-out", folder / CERTIFICATE)


def _new_key(path: Path) -> None:
    _openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", path)


def _openssl(*arguments: str | Path) -> None:
    program = shutil.which("openssl")
    if program is None:
        raise ConfigError(
            "the openssl command is not on the PATH; install it (apt install openssl), or name existing certificates "
            "in `security`"
        )
    try:
        done = subprocess.run(
            [program, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_OPENSSL_S_MAX,
            umask=0o077,
            check=False,
        )
    except subprocess.TimeoutExpired as err:
        raise ConfigError(f"openssl {arguments[0]} did not exit within {_OPENSSL_S_MAX} s; try again") from err
    if done.returncode != 0:
        raise ConfigError(f"openssl {arguments[0]} failed: {done.stderr.strip()[-400:]}; is it version 1.1.1 or newer?")


def _write_private(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)

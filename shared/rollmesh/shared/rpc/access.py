"""`Access`: the credentials of a process as client and as server: the token, and TLS if it is configured.

Every server, channel and node gets one value with both. With `tls` both sides authenticate (mutual TLS): a server
accepts only clients with a certificate of the same CA. Neither the token nor the content of a file is part of a repr, a
message or a log.
"""

from __future__ import annotations

import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from rollmesh.shared.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """PEM files of one party. The same certificate is used as server and as client."""

    ca: Path
    """Certificates of the authority that signs every party's certificate."""
    certificate: Path
    """This party's certificate, with its chain; its SANs must contain the advertised host."""
    key: Path
    """The private key of the certificate."""

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials of a server that requires a client certificate. ConfigError if a file cannot be read."""
        pair = (_read(self.key), _read(self.certificate))
        return grpc.ssl_server_credentials([pair], root_certificates=_read(self.ca), require_client_auth=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return credentials of a client with a certificate. ConfigError if a file cannot be read."""
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.certificate))

    def ssl_context(self) -> ssl.SSLContext:
        """Return the context for clients other than gRPC's. ConfigError if the files cannot be read, or do not belong
        together."""
        for path in (self.ca, self.certificate, self.key):
            _read(path)
        try:
            context = ssl.create_default_context(cafile=self.ca)
            context.load_cert_chain(self.certificate, self.key)
        except ssl.SSLError as err:
            raise ConfigError(
                f"{self.ca}, {self.certificate}, {self.key}: not PEM files of a CA, a certificate and its key "
                f"({err.reason}); `rollmesh certs` makes some",
                path=str(self.certificate),
            ) from err
        return context

    def check(self) -> float:
        """Let the certificate authenticate itself as server and as client. Return the Unix time at which it or its CA
        expires.

        ConfigError if it cannot: it is expired, not valid yet, of another CA, or not for both uses.
        """
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        client = self.ssl_context()
        client.check_hostname = False
        server.load_cert_chain(self.certificate, self.key)
        server.load_verify_locations(self.ca)
        server.verify_mode = ssl.CERT_REQUIRED
        try:
            used = _handshake(client, server)
        except ssl.SSLError as err:
            why = getattr(err, "verify_message", "") or err.reason
            raise ConfigError(
                f"{self.certificate}: this certificate cannot be used with the CA in {self.ca}: {why}; replace it "
                "(`rollmesh certs --ca` signs one for servers and clients) and check the clock of this host",
                path=str(self.certificate),
            ) from err
        signers = [one for one in client.get_ca_certs() if one["subject"] == used["issuer"]]
        return min(ssl.cert_time_to_seconds(str(one["notAfter"])) for one in (used, *signers))


@dataclass(frozen=True, slots=True)
class Access:
    """The run's token, and TLS if calls leave the machine."""

    token: str = field(repr=False)
    tls: Tls | None = None

    def __post_init__(self) -> None:
        if not self.token:
            raise ValueError("`token` must not be empty; rollmesh.shared.domain.ids.new_secret() generates one")

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """None without TLS; a server must then listen on loopback."""
        return None if self.tls is None else self.tls.server_credentials()

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """None without TLS."""
        return None if self.tls is None else self.tls.channel_credentials()


def _handshake(client: ssl.SSLContext, server: ssl.SSLContext) -> dict[str, Any]:
    """Connect two contexts in memory and return the server's certificate. Raises SSLError as a connection between two
    hosts would."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)]
    for side in (*sides, *sides):  # the last message of TLS 1.3 is the second one of the client
        with suppress(ssl.SSLWantReadError):
            side.do_handshake()
    found: dict[str, Any] = sides[0].getpeercert() or {}
    return found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as err:
        raise ConfigError(
            f"cannot read {path} ({err.strerror}); `security` names the TLS files, `rollmesh certs` makes some",
            path=str(path),
        ) from err

"""Properties of an address (host:port or unix:PATH): whether only this machine reaches it, and whether a client can
call it."""

from __future__ import annotations

import ipaddress
import re

from rollmesh.shared.errors import ConfigError


def host_of(address: str) -> str:
    """Return the host of host:port, without brackets; empty for unix:PATH."""
    return "" if address.startswith("unix:") else address.rpartition(":")[0].strip("[]")


def port_of(address: str) -> int:
    """Return the port of host:port; 0 for unix:PATH, or without a port."""
    text = address.rpartition(":")[2]
    return int(text) if text.isdecimal() and not address.startswith("unix:") else 0


def split_addresses(text: str) -> list[str]:
    """Return the addresses of one server that is found at the first of them that responds. Raises `ConfigError` for a
    list with a name.

    A name that resolves to the current address of the server needs no list.
    """
    found = text.split(",")
    for one in found if len(found) > 1 else ():
        if not is_ip_address(host_of(one)):
            raise ConfigError(
                f"a list of addresses must contain only IP:PORT, got {one!r} in {text}; use one name without a list, "
                "or IP addresses",
                address=text,
            )
    return found


def is_ip_address(host: str) -> bool:
    """Return whether `host` is an IPv4 or IPv6 address, without brackets."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_address(text: str) -> bool:
    """Return whether a client can call `text`: host:port with a port above 0, or unix:PATH."""
    if text.startswith("unix:"):
        return len(text) > len("unix:") and text.isprintable()
    return bool(re.fullmatch(r"[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.%a-z]{2,64}\]", text.rpartition(":")[0])) and (
        0 < port_of(text) < 65536
    )


def join_host_port(host: str, port: int) -> str:
    """host:port, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches `host`. A name other than localhost can resolve to any address, so it
    does not count."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """Return whether `host` means every interface. A server can listen on it, but a client cannot call it."""
    try:
        return host in ("", "*") or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def require_local(address: str) -> None:
    """Raise `ConfigError` unless `address` can only be reached from this machine."""
    if not address.startswith("unix:") and not is_loopback(host_of(address)):
        raise ConfigError(
            f"refusing to listen on {address} without TLS: tokens and data would cross the network unencrypted; "
            "use 127.0.0.1, or name certificates in `security` (`rollmesh certs` makes some)",
            address=address,
        )


def advertised(address: str, advertise: str, port: int) -> str:
    """Return the advertised address of a server that listens on `address` and got `port`.

    Raises `ConfigError` if clients could not call it.
    """
    if address.startswith("unix:"):
        return address
    host = advertise or host_of(address)
    if is_wildcard(host):
        raise ConfigError(
            f"a server on {address} listens on every interface, but others need a host to call: set `advertise` to a "
            "name or address by which they reach this machine",
            address=address,
        )
    return join_host_port(host, port)

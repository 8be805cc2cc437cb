"""Resolve names to addresses that sessions may connect to. The caller connects to the returned address and never
resolves the name again, so a name with changing addresses gains nothing."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence

from rollmesh.services.sandbox.egress.exchange import EgressRefused

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""Resolves a host and port to addresses as text. Raises OSError."""
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


async def resolve_by_dns(host: str, port: int) -> Sequence[str]:
    """Resolve with the resolver of the system."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


async def resolve(
    host: str, port: int, *, fixed: Mapping[str, Sequence[str]], resolver: Resolver, allow_private: bool
) -> Sequence[str]:
    """Return the addresses of a host. All must be allowed; one forbidden address rejects the host. Raises
    EgressRefused."""
    try:
        found = fixed[host] if host in fixed else await resolver(host, port)
    except OSError as error:
        raise EgressRefused("upstream", f"cannot resolve the name {host}: {error.strerror or error}") from error
    except UnicodeError as error:  # a label that no name can have
        raise EgressRefused("upstream", f"{host} is not a valid name: {error}") from error
    if not found:
        raise EgressRefused("upstream", f"the name {host} has no address")
    for text in found:
        if not may_connect(text, allow_private=allow_private):
            raise EgressRefused("address", f"the name {host} resolves to an address that is not public")
    return found


def may_connect(text: str, *, allow_private: bool) -> bool:
    """Return whether an address is public; with `allow_private` also loopback and private ones. Link-local and special
    addresses are never allowed."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:  # with a scope, e.g. fe80::1%eth0
        return False
    return all(_single_may(each, allow_private) for each in (address, *_embedded(address)))


def _single_may(address: _Address, allow_private: bool) -> bool:
    if address.is_link_local or address.is_multicast or address.is_unspecified:
        return False
    if isinstance(address, ipaddress.IPv6Address) and (address.ipv4_mapped is not None or address in _NAT64):
        return True  # the embedded address decides
    site_local = isinstance(address, ipaddress.IPv6Address) and address.is_site_local
    if address.is_loopback or site_local:
        return allow_private
    if address.is_reserved:
        return False
    return address.is_global or (allow_private and address.is_private)


def _embedded(address: _Address) -> Sequence[_Address]:
    """Return the IPv4 addresses that are embedded in an IPv6 address."""
    if isinstance(address, ipaddress.IPv4Address):
        return ()
    found = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in _NAT64:
        found.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return [each for each in found if each is not None]

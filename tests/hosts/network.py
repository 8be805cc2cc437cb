"""Hosts on one machine: a network namespace each, joined by a switch that can cut, lose, delay and limit their traffic.

    async with network("a", "b") as net:
        process = await net.host("a").run("ip", "address")
        net.link("b", "a").cut = True          # nothing of b reaches a any more, while a still reaches b

Each namespace has one TUN device. The switch is a thread of this process that reads every packet, looks up the link of
its source and destination, and writes the packet to the other device when it is due. A link has one direction, so that
a fault can be asymmetric. This process is a host too, named `observer`, without a namespace. Requires root and
/dev/net/tun.
"""

from __future__ import annotations

import asyncio
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollmesh.shared.process.process_launch import bound_to_parent

OBSERVER = "observer"
MTU = 16_000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_QUEUED_MAX = 4096
"""Packets that wait for their time; beyond it the switch drops, as a router does."""
_POLL_S = 0.5


@dataclass
class Link:
    """Traffic from one host to another. Fields may be changed at any time."""

    cut: bool = False
    loss: float = 0.0
    """Share of the packets that are dropped."""
    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    """0: no limit."""
    num_packets: int = 0
    num_dropped: int = 0
    free_s: float = 0.0
    """When the link has sent everything so far."""


@dataclass
class Host:
    """A host of the network."""

    name: str
    address: str
    namespace: str
    """Empty for the observer."""
    fd: int
    processes: list[asyncio.subprocess.Process] = field(default_factory=list)

    def command(self, *arguments: str) -> list[str]:
        """Return the command line that runs `arguments` on this host."""
        return [*(("nsenter", f"--net=/run/netns/{self.namespace}") if self.namespace else ()), *arguments]

    async def start(self, *arguments: str, log: Path, **options: Any) -> asyncio.subprocess.Process:
        """Start a process on this host. It is killed at the end of the network if it still runs."""
        with log.open("ab") as out:
            process = await asyncio.create_subprocess_exec(
                *bound_to_parent(self.command(*arguments)), stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out, **options
            )  # fmt: skip
        self.processes.append(process)
        return process


class Network:
    """All hosts, and the links between them."""

    def __init__(self, hosts: Sequence[Host], seed: int) -> None:
        self._hosts = {host.name: host for host in hosts}
        self._by_address = {bytes(map(int, host.address.split("."))): host for host in hosts}
        self._links = {(one.name, other.name): Link() for one in hosts for other in hosts if one is not other}
        self._random = random.Random(seed)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._forward, name="switch", daemon=True)
        self._thread.start()

    def host(self, name: str) -> Host:
        return self._hosts[name]

    def link(self, source: str, destination: str) -> Link:
        """Return the traffic from one host to another."""
        return self._links[source, destination]

    def between(self, one: str, other: str) -> tuple[Link, Link]:
        """Return both directions."""
        return self.link(one, other), self.link(other, one)

    def of(self, name: str) -> list[Link]:
        """Return every link from and to a host, except those of the observer."""
        return [link for pair, link in self._links.items() if name in pair and OBSERVER not in pair]

    def heal(self) -> None:
        """Remove every fault."""
        for link in self._links.values():
            link.cut, link.loss, link.delay_s, link.bytes_per_s = False, 0.0, 0.0, 0.0

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        for host in self._hosts.values():
            os.close(host.fd)

    # The switch -------------------------------------------------------------------------------------------------------

    def _forward(self) -> None:
        """Move packets until `close`."""
        poll = select.poll()
        for host in self._hosts.values():
            poll.register(host.fd, select.POLLIN)
        waiting: list[tuple[float, int, int, bytes]] = []
        number = 0
        while not self._stopped.is_set():
            wait_s = min(_POLL_S, max(0.0, waiting[0][0] - time.monotonic())) if waiting else _POLL_S
            for fd, _ in poll.poll(wait_s * 1000):
                packet = os.read(fd, MTU + 64)
                due_s, out = self._route(packet)
                if out >= 0 and len(waiting) < _QUEUED_MAX:
                    number += 1
                    heapq.heappush(waiting, (due_s, number, out, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, out, packet = heapq.heappop(waiting)
                with suppress(OSError):  # the device is going down
                    os.write(out, packet)

    def _route(self, packet: bytes) -> tuple[float, int]:
        """Return when to deliver a packet and to which device; -1 if it is dropped."""
        source, destination = self._by_address.get(packet[12:16]), self._by_address.get(packet[16:20])
        if packet[0] >> 4 != 4 or source is None or destination is None or source is destination:
            return 0.0, -1
        link = self._links[source.name, destination.name]
        link.num_packets += 1
        if link.cut or self._random.random() < link.loss:
            link.num_dropped += 1
            return 0.0, -1
        sent_s = max(link.free_s, time.monotonic())
        if link.bytes_per_s:
            sent_s += len(packet) / link.bytes_per_s
        link.free_s = sent_s
        return sent_s + link.delay_s, destination.fd


@asynccontextmanager
async def network(*names: str, seed: int = 0) -> AsyncIterator[Network]:
    """Create hosts, and remove them with their processes at the end."""
    stem = f"rm{os.getpid()}"
    net = f"10.{os.getpid() % 200 + 20}.7"
    hosts: list[Host] = []
    made = None
    try:
        for number, name in enumerate((*names, OBSERVER), start=1):
            namespace = "" if name == OBSERVER else f"{stem}{name}"
            hosts.append(_make_host(name, f"{net}.{number}", namespace, f"{stem}{number}"))
        made = Network(hosts, seed)
        yield made
    finally:
        for host in hosts:
            for process in host.processes:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        if made is not None:
            made.close()
        _delete([host.namespace for host in hosts if host.namespace])


def _make_host(name: str, address: str, namespace: str, device: str) -> Host:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI))
    ip = ["ip"]
    if namespace:
        subprocess.run(["ip", "netns", "add", namespace], check=True)
        subprocess.run(["ip", "link", "set", device, "netns", namespace], check=True)
        ip += ["-n", namespace]
        subprocess.run([*ip, "link", "set", "lo", "up"], check=True)
    subprocess.run([*ip, "address", "add", f"{address}/24", "dev", device], check=True)
    subprocess.run([*ip, "link", "set", device, "mtu", str(MTU), "up"], check=True)
    return Host(name, address, namespace, fd)


def _delete(namespaces: Sequence[str]) -> None:
    for name in namespaces:
        subprocess.run(["ip", "netns", "delete", name], check=False)


def possible() -> bool:
    """Return whether this machine can make hosts."""
    return os.geteuid() == 0 and Path("/dev/net/tun").exists()

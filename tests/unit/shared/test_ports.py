"""Ports that last, and who has one."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rollmesh.shared.net import ports
from rollmesh.shared.net.ports import is_taken, lasting_ports, owner_of


def test_ports_lie_outside_the_range_of_outgoing_connections_and_differ() -> None:
    begin = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = lasting_ports(5, random.Random(3))
    assert len(set(found)) == 5
    if begin > 10240:
        assert max(found) < begin


def test_a_port_that_another_process_listens_on_is_not_chosen_and_its_owner_is_named() -> None:
    (port,) = lasting_ports(1, random.Random(7))
    assert not is_taken("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", port)):
        assert is_taken("127.0.0.1", port)
        assert owner_of(port).startswith(f"process {os.getpid()} (")
        assert lasting_ports(1, random.Random(7)) != [port]
    assert owner_of(port) == "another process"


def test_a_port_is_not_returned_twice_although_its_first_user_does_not_listen_yet() -> None:
    first, second = (lasting_ports(3, random.Random(11)) for _ in range(2))
    assert set(first).isdisjoint(second)
    choice = "import random; from rollmesh.shared.net.ports import lasting_ports; print(*lasting_ports(3, random.Random(11)))"
    other = subprocess.run([sys.executable, "-c", choice], check=True, capture_output=True, text=True).stdout.split()
    assert set(first).isdisjoint(map(int, other)), "another process"


def test_the_oldest_reservation_ends_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_reserved", {})
    monkeypatch.setattr(ports, "_RESERVED_MAX", 2)
    oldest, *_ = lasting_ports(3, random.Random(13))
    assert lasting_ports(1, random.Random(13)) == [oldest]


def test_an_address_of_another_machine_is_not_a_taken_port() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        is_taken("192.0.2.1", 80)

"""A run over three hosts, whose network fails in every way that networks fail. Nothing is lost and nothing is trained
twice.

`pytest -s` prints a line of the table in docs/reliability.md per fault.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rollmesh.v1 import coordinator_pb2 as pb

from .network import Network, network, possible
from .world import MAIN, NODES, TRAINER, HostsWorld, hosts_world

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not possible(), reason="network namespaces need root and /dev/net/tun"),
]
KINDS = ("inference", "rollout", "sandbox", "reward", "data", "gateway")
LOSS, DELAY_S, BYTES_PER_S = 0.1, 0.1, 2e6


def partition(host: str) -> Callable[[Network], None]:
    """Nothing reaches the host or comes from it."""

    def apply(net: Network) -> None:
        for link in net.of(host):
            link.cut = True

    return apply


def deaf(host: str) -> Callable[[Network], None]:
    """What the host sends arrives, and nothing arrives at it."""

    def apply(net: Network) -> None:
        for other in {MAIN, NODES, TRAINER} - {host}:
            net.link(other, host).cut = True

    return apply


def mute(host: str) -> Callable[[Network], None]:
    """Everything arrives at the host, and nothing that it sends arrives."""

    def apply(net: Network) -> None:
        for other in {MAIN, NODES, TRAINER} - {host}:
            net.link(host, other).cut = True

    return apply


def lossy(net: Network) -> None:
    """A share of what the services send is lost; what they receive arrives."""
    net.link(MAIN, NODES).loss = net.link(MAIN, TRAINER).loss = LOSS


def distant(net: Network) -> None:
    """Every packet takes longer, and links are slow."""
    for host in (NODES, TRAINER):
        for link in net.of(host):
            link.delay_s, link.bytes_per_s = DELAY_S, BYTES_PER_S


CUTS = {
    "nodes: nothing arrives or leaves": (partition(NODES), NODES),
    "nodes: nothing arrives": (deaf(NODES), NODES),
    "nodes: nothing leaves": (mute(NODES), NODES),
    "learner: nothing arrives or leaves": (partition(TRAINER), TRAINER),
    "learner: nothing arrives": (deaf(TRAINER), TRAINER),
    "learner: nothing leaves": (mute(TRAINER), TRAINER),
}
SLOW = {"a tenth of what the services send is lost": lossy, "100 ms per direction, 2 MB/s per link": distant}


async def test_a_run_over_hosts_that_are_cut_off_and_come_back(tmp_path: Path) -> None:
    async with network(MAIN, NODES, TRAINER) as net, hosts_world(net, tmp_path) as mesh:
        names = [await mesh.join(kind, NODES) for kind in KINDS]
        await mesh.join("learner", TRAINER)
        await mesh.until_ready(*names, "learner")
        await mesh.until_update(2)
        for label, (apply, host) in CUTS.items():
            cut = ["learner"] if host == TRAINER else names
            begin_s = time.monotonic()
            apply(net)
            await mesh.until_gone(*cut)
            gone_s = time.monotonic() - begin_s
            update = await mesh.newest_update()
            if host != TRAINER:  # the services and nodes of the other hosts continue
                update = await mesh.until_update(update + 2)
            net.heal()
            healed_s = time.monotonic()
            await mesh.until_ready(*cut)
            back_s = time.monotonic() - healed_s
            await mesh.until_update(update + 2)
            print(f"| {label} | {gone_s:.1f} | {back_s:.1f} | {time.monotonic() - healed_s:.1f} |", flush=True)
        for label, slow in SLOW.items():
            slow(net)
            begin_s, update = time.monotonic(), await mesh.newest_update()
            await mesh.until_update(update + 3)
            print(f"| {label} | | | 3 updates in {time.monotonic() - begin_s:.1f} |", flush=True)
            nodes = await mesh.fleet()
            assert all(nodes[name].state == pb.NODE_STATE_READY for name in (*names, "learner"))
            net.heal()
        await check(mesh)


async def test_a_depot_on_another_host_is_cut_off_and_comes_back(tmp_path: Path) -> None:
    async with network(MAIN, NODES, TRAINER) as net, hosts_world(net, tmp_path) as mesh:
        code, said = await mesh.command("drain", "depot", str(tmp_path / "run"), "--wait")
        assert code == 0, said
        names = [await mesh.join(kind, NODES) for kind in ("depot", "inference")]
        await mesh.join("learner", TRAINER)
        await mesh.until_ready(*names, "learner")
        await mesh.until_update(2)
        partition(NODES)(net)
        await mesh.until_gone(*names)
        update = await mesh.newest_update()
        net.heal()
        await mesh.until_ready(*names)
        await mesh.until_update(update + 3)
        await check(mesh)


async def test_hosts_whose_clocks_are_fast_work_and_are_reported(tmp_path: Path) -> None:
    async with network(MAIN, NODES, TRAINER) as net, hosts_world(net, tmp_path) as mesh:
        ahead = [await mesh.join(kind, NODES, prefix=("faketime", "-f", "+90s")) for kind in KINDS]
        await mesh.join("learner", TRAINER, prefix=("faketime", "-f", "+90s"))
        await mesh.until_ready(*ahead, "learner")
        _, said = await mesh.command("status", str(tmp_path / "run"))
        reported = re.findall(
            r"the clock of \S+ \(([^)]*)\) is \d+ s ahead of the coordinator's", " ".join(said.split())
        )
        assert [sorted(names.split(", ")) for names in reported] == [sorted([*ahead, "learner"])], said
        for name in (*ahead, "learner"):
            assert "synchronize the clocks" in (tmp_path / f"{name}.log").read_text()
        await mesh.until_update(4)
        await check(mesh)


async def check(mesh: HostsWorld) -> None:
    """Stop the run and compare ledger and checkpoint."""
    report = await mesh.settle()
    assert report.samples.failed == 0
    print(
        f"| {report.updates} updates, {report.samples.trained} samples trained, {report.samples.stale} stale |",
        flush=True,
    )

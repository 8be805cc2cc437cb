"""Audit one run in a process with low priority, for the live page.

    python -m rollmesh.mesh.live_audit < ORDER        # ORDER is an AuditOrder in JSON

The order is read from the standard input, because it contains a password. The report goes to the standard output as
JSON, an error to the standard error with exit code 1.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from pathlib import Path

import msgspec

from rollmesh.services.coordinator.audit import audit_run
from rollmesh.services.coordinator.audit_chain import StoredHead
from rollmesh.services.coordinator.audit_report import AuditReport
from rollmesh.shared.bus.archive_bus import ArchiveBus
from rollmesh.shared.bus.jetstream_bus import JetStreamBus
from rollmesh.shared.bus.login import BusLogin
from rollmesh.shared.domain.ledger_head import LedgerHead
from rollmesh.shared.errors import MeshError
from rollmesh.shared.rpc.access import Tls

NICE = 15
MEMORY_BYTES_MAX = 8 << 30
"""Limit of the address space of the process."""


class AuditOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What to audit, and the login at NATS."""

    url: str
    user: str
    password: str
    tls: tuple[str, ...] = ()
    """Paths of ca, certificate and key; empty without TLS."""
    run: str
    heads: tuple[tuple[str, str], ...] = ()
    """(place, POSITION:HASH) of each head of the ledger that is stored elsewhere."""
    checkpoint: str = ""
    """Checkpoint whose list of samples is compared, or the folder of checkpoints; empty: none."""
    archive: str = ""
    """Folder of the archive segments; empty on a host without it."""


def main() -> int:
    """Audit the run of the order, and return the exit code."""
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=AuditOrder)
    try:
        report = asyncio.run(_audit(order))
    except MeshError as err:
        print(err, file=sys.stderr)
        return 1
    except MemoryError:
        print(f"the audit needs more than {MEMORY_BYTES_MAX >> 30} GiB; call `rollmesh audit`", file=sys.stderr)
        return 1
    sys.stdout.buffer.write(msgspec.json.encode(report))
    return 0


async def _audit(order: AuditOrder) -> AuditReport:
    tls = Tls(ca=Path(order.tls[0]), certificate=Path(order.tls[1]), key=Path(order.tls[2])) if order.tls else None
    server = await JetStreamBus.connect(order.url, login=BusLogin(user=order.user, password=order.password, tls=tls))
    bus = ArchiveBus(server, Path(order.archive) if order.archive else None, writes=False)
    try:
        heads = [StoredHead(where, LedgerHead.parse(text)) for where, text in order.heads]
        return await audit_run(
            bus, order.run, checkpoint=Path(order.checkpoint) if order.checkpoint else None, heads=heads
        )
    finally:
        await bus.close()


if __name__ == "__main__":
    sys.exit(main())

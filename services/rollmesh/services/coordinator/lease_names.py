"""Episode leases on the wire: the core's lease ids are unique in a run, a worker may serve several runs."""

from __future__ import annotations

SEPARATOR = "/"


def to_wire(run: str, lease_id: str) -> str:
    return f"{run}{SEPARATOR}{lease_id}"


def from_wire(name: str) -> tuple[str, str]:
    """(run, lease id of the core); a name without a run has an empty one, which is no run."""
    run, found, lease_id = name.partition(SEPARATOR)
    return (run, lease_id) if found else ("", name)

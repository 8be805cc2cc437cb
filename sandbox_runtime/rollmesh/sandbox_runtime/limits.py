"""The limits of one session, as they travel from the service to the jail. Standard library only: the jail reads them."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on one session; each is on by default and hitting one is the program's outcome, never an infra failure."""

    call_s: float = 10.0
    """Wall time of one call. The jail interrupts the code at this moment and keeps the session; the parent kills it a grace later."""
    cpu_s: float = 10.0
    """CPU time of one call in the interpreter's process, all its threads together."""
    cpu_total_s: int = 600
    """CPU time of any one process over the session's life; then the kernel kills it."""
    memory_bytes: int = 512 << 20
    """Address space of any one process; the whole session's memory where a memory cgroup is writable."""
    address_space_bytes: int = 0
    """Address space that a process may take for itself, where it is more than memory_bytes: node and duckdb reserve far more than
    they use. The session's memory is then bounded by the memory cgroup alone. 0 means memory_bytes."""
    processes_max: int = 32
    """Processes and threads of the session together, its interpreter included."""
    cpus: float = 1.0
    """Cores of the session together, where a cpu cgroup is writable: what all its processes and threads may use at a time."""
    disk_bytes: int = 64 << 20
    """Size of the private directory, which lives in memory."""
    inodes_max: int = 4096
    """Files and directories in the private directory."""
    file_bytes: int = 32 << 20
    """Size of any one file written."""
    open_files_max: int = 128
    """Descriptors of any one process."""
    output_bytes: int = 64 << 10
    """Kept of stdout, of stderr and of the result, each; the rest is dropped and marked truncated."""
    flood_bytes: int = 8 << 20
    """Printed by one call before it is stopped with the outcome OUTPUT."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0 and field.name != "address_space_bytes":
                raise ValueError(f"limits.{field.name} must be positive, is {value}")
        if self.address_space_bytes and self.address_space_bytes < self.memory_bytes:
            raise ValueError(
                f"limits.address_space_bytes {self.address_space_bytes} is below limits.memory_bytes {self.memory_bytes}"
            )
        if self.flood_bytes < self.output_bytes:
            raise ValueError(f"limits.flood_bytes {self.flood_bytes} is below limits.output_bytes {self.output_bytes}")

    def as_dict(self) -> dict[str, float]:
        """Plain numbers, for a JSON frame."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

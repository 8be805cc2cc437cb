"""The limits of one session, as the service sends them to the jail. Standard library only, because the jail imports
them."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one session. All are enabled by default. Reaching one is an outcome of the program and never an
    infrastructure failure."""

    call_s: float = 10.0
    """Wall seconds of one call. The jail then interrupts the code and keeps the session; the service kills it a grace
    period later."""
    cpu_s: float = 10.0
    """CPU seconds of one call in the interpreter's process, all its threads together."""
    cpu_total_s: int = 600
    """CPU seconds of each process over the lifetime of the session; the kernel then kills the process."""
    memory_bytes: int = 512 << 20
    """Bytes of address space of each process; also the memory of the whole session if a memory cgroup is writable."""
    address_space_bytes: int = 0
    """Bytes of address space that a process may reserve if that is more than memory_bytes: node and duckdb reserve far
    more than they use. The memory of the session is then bounded only by the memory cgroup. 0 means memory_bytes."""
    processes_max: int = 32
    """Maximum number of processes and threads of the session, including its interpreter."""
    cpus: float = 1.0
    """Maximum number of cores that all processes of the session use together, if a cpu cgroup is writable."""
    disk_bytes: int = 64 << 20
    """Bytes of the private directory, which is stored in memory."""
    inodes_max: int = 4096
    """Maximum number of files and directories in the private directory."""
    file_bytes: int = 32 << 20
    """Maximum bytes of each written file."""
    open_files_max: int = 128
    """Maximum number of descriptors of each process."""
    output_bytes: int = 64 << 10
    """Bytes retained of stdout, of stderr and of the result, each; the rest is dropped, and the result is marked as
    truncated."""
    flood_bytes: int = 8 << 20
    """Bytes that one call may print before it is stopped with the outcome OUTPUT."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0 and field.name != "address_space_bytes":
                raise ValueError(f"limits.{field.name} must be > 0, got {value}")
        if self.address_space_bytes and self.address_space_bytes < self.memory_bytes:
            raise ValueError(
                f"limits.address_space_bytes {self.address_space_bytes} must be >= limits.memory_bytes "
                f"{self.memory_bytes}"
            )
        if self.flood_bytes < self.output_bytes:
            raise ValueError(
                f"limits.flood_bytes {self.flood_bytes} must be >= limits.output_bytes {self.output_bytes}"
            )

    def as_dict(self) -> dict[str, float]:
        """Return plain numbers for a JSON frame."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

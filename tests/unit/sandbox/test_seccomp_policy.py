"""The compiled filter, executed by a small BPF machine and compared with the intended verdict of system calls and their
arguments."""

from __future__ import annotations

import functools
import struct
import sys
from collections.abc import Sequence

import pyseccomp
import pytest

from rollmesh.sandbox_runtime import namespaces
from rollmesh.services.sandbox import seccomp_policy
from rollmesh.shared.errors import SandboxFailed

ALLOW, KILL, EPERM, ENOSYS, EOPNOTSUPP = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026, 0x0005005F
MACHINES = {"x86_64": pyseccomp.Arch.X86_64, "aarch64": pyseccomp.Arch.AARCH64}
HIGH = 1 << 32
AF_UNIX, AF_INET, STREAM, DGRAM, CLOEXEC = 1, 2, 1, 2, 0o2000000


@functools.cache
def instructions(program: bytes) -> list[tuple[int, ...]]:
    return list(struct.iter_unpack("<HBBI", program))


def verdict(program: bytes, *, arch: int, number: int, arguments: Sequence[int] = ()) -> int:
    """Execute classic BPF, as far as a filter may use it. Return the kernel's verdict."""
    data = struct.pack("<IIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    code = instructions(program)
    at = loaded = 0
    while True:
        kind, if_true, if_false, value = code[at]
        at += 1
        if kind == 0x20:
            (loaded,) = struct.unpack_from("<I", data, value)
        elif kind == 0x06:
            return int(value)
        elif kind == 0x54:
            loaded &= value
        elif kind == 0x05:
            at += value
        else:
            conditions = {0x15: loaded == value, 0x25: loaded > value, 0x35: loaded >= value, 0x45: loaded & value != 0}
            at += if_true if conditions[kind] else if_false


def of(machine: str, name: str, *arguments: int) -> int:
    number = pyseccomp.resolve_syscall(MACHINES[machine], name)
    program = seccomp_policy.compiled(machine)
    return verdict(program, arch=MACHINES[machine], number=number, arguments=arguments)


@pytest.mark.parametrize("machine", MACHINES)
def test_every_number_has_its_verdict(machine: str) -> None:
    arch = MACHINES[machine]
    expected = {number: ENOSYS for number in range(700)}
    for names, answer in (
        (seccomp_policy.ALLOWED, ALLOW), (seccomp_policy.REFUSED, EPERM), (seccomp_policy.UNSUPPORTED, EOPNOTSUPP),
    ):  # fmt: skip
        expected |= {pyseccomp.resolve_syscall(arch, name): answer for name in names}
    with_arguments = {"clone": ALLOW, "mknodat": ALLOW, "mknod": ALLOW, "socketpair": EPERM, "fcntl": ALLOW}
    expected |= {pyseccomp.resolve_syscall(arch, name): answer for name, answer in with_arguments.items()}
    program = seccomp_policy.compiled(machine)
    for number in range(700):
        assert verdict(program, arch=arch, number=number) == expected[number], number


def test_lists_do_not_overlap() -> None:
    assert not set(seccomp_policy.ALLOWED) & set(seccomp_policy.REFUSED)


@pytest.mark.parametrize("machine", MACHINES)
def test_clone_makes_threads_and_forks_but_no_namespaces(machine: str) -> None:
    thread, fork = 0x3D0F00, 0x1200011
    assert of(machine, "clone", thread) == of(machine, "clone", fork) == ALLOW
    for flag in (namespaces.CLONE_NEWUSER, namespaces.CLONE_NEWNS, namespaces.CLONE_NEWPID, namespaces.CLONE_NEWNET):
        assert of(machine, "clone", thread | flag) == EPERM
    assert of(machine, "clone3") == ENOSYS


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("ioctl", (0, 0x5413), ALLOW),
        ("ioctl", (0, 0x5412), EPERM),
        ("ioctl", (0, 0x5412 | HIGH), EPERM),
        ("ioctl", (0, 0x541C), EPERM),
        ("ioctl", (0, 0x8912), ENOSYS),
        ("prctl", (15,), ALLOW),
        ("prctl", (22,), EPERM),
        ("prctl", (22 | HIGH,), EPERM),
        ("prctl", (36,), EPERM),
        ("prctl", (59,), ENOSYS),
        ("setsockopt", (3, 1, 7), ALLOW),
        ("setsockopt", (3, 1, 21), ALLOW),
        *(("setsockopt", (3, 1, option), ENOSYS) for option in (26, 27, 44, 50, 51, 52, 68)),
        ("setsockopt", (3, 1 | HIGH, 26 | HIGH), ENOSYS),
        ("setsockopt", (3, 6, 7), ENOSYS),
        *(("fcntl", (3, command), ALLOW) for command in (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1031, 1032)),
        *(("fcntl", (3, command), ENOSYS) for command in (1024, 1026, 1026 | HIGH, 1034)),
        ("mknodat", (0, 0, 0o010644), ALLOW),
        ("mknodat", (0, 0, 0o020644), EPERM),
        ("mknodat", (0, 0, 0o060644), EPERM),
        ("socket", (AF_UNIX, STREAM), EPERM),
        ("socketpair", (AF_UNIX, STREAM | CLOEXEC), ALLOW),
        ("socketpair", (AF_UNIX, DGRAM), EPERM),
        ("socketpair", (AF_UNIX | HIGH, STREAM), EPERM),
        ("socketpair", (AF_INET, STREAM), EPERM),
    ],
)
@pytest.mark.parametrize("machine", MACHINES)
def test_arguments_decide(machine: str, name: str, arguments: tuple[int, ...], answer: int) -> None:
    assert of(machine, name, *arguments) == answer


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("prlimit64", (0,), ALLOW), ("prlimit64", (77,), ENOSYS), ("prlimit64", (HIGH | 77,), ENOSYS),
        ("sched_setaffinity", (0,), ALLOW), ("sched_setaffinity", (77,), ENOSYS), ("sched_setattr", (77,), ENOSYS),
        ("sched_setparam", (77,), ENOSYS), ("sched_setscheduler", (77,), ENOSYS),
        ("setpriority", (0, 0), ALLOW), ("setpriority", (0, 77), ENOSYS), ("setpriority", (2, 0), ENOSYS),
        ("fchmod", (3,), EPERM), ("fchmodat", (3,), EPERM), ("fchownat", (3,), EPERM), ("utimensat", (3,), EPERM),
        ("openat", (3,), ALLOW),
    ],
)  # fmt: skip
@pytest.mark.parametrize("machine", MACHINES)
def test_what_a_shared_uid_owns_is_out_of_reach(
    machine: str, name: str, arguments: tuple[int, ...], answer: int
) -> None:
    program = seccomp_policy.compiled(machine, shares_uid=True)
    number = pyseccomp.resolve_syscall(MACHINES[machine], name)
    assert verdict(program, arch=MACHINES[machine], number=number, arguments=arguments) == answer


def test_foreign_architectures_are_killed() -> None:
    program = seccomp_policy.compiled("x86_64")
    assert verdict(program, arch=pyseccomp.Arch.X86, number=0) == KILL
    assert verdict(program, arch=pyseccomp.Arch.X86_64, number=0x40000000) == KILL, "x32"
    assert verdict(seccomp_policy.compiled("aarch64"), arch=pyseccomp.Arch.ARM, number=0) == KILL


def test_an_unknown_machine_fails_closed() -> None:
    with pytest.raises(SandboxFailed, match="no policy for vax; known: x86_64, aarch64"):
        seccomp_policy.compiled("vax")


def test_a_missing_library_fails_closed_and_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyseccomp", None)
    with pytest.raises(SandboxFailed, match="apt install libseccomp2"):
        seccomp_policy.compiled.__wrapped__("x86_64")

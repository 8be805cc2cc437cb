"""The hand-assembled filter, run in a small BPF machine against the intended verdict of every system call number."""

from __future__ import annotations

import struct

import pytest

from rollmesh.sandbox_runtime import namespaces, seccomp

ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
CLONE3 = 435


def verdict(program: bytes, *, arch: int, number: int, arguments: tuple[int, ...] = (0,) * 6) -> int:
    """What the kernel would answer (classic BPF, the four instructions in use)."""
    data = struct.pack("<IIQ6Q", number, arch, 0, *arguments)
    code = list(struct.iter_unpack("<HBBI", program))
    at = loaded = 0
    while True:
        kind, if_true, if_false, value = code[at]
        at += 1
        if kind == 0x20:
            (loaded,) = struct.unpack_from("<I", data, value)
        elif kind == 0x06:
            return int(value)
        else:
            taken = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[kind]
            at += if_true if taken else if_false


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_number_has_its_verdict(machine: str) -> None:
    program = seccomp.assemble(machine)
    arch, _, _ = seccomp._ARCHITECTURE[machine]
    denied = set(seccomp._DENIED[machine].values())
    for number in range(600):
        expected = ENOSYS if number == CLONE3 else EPERM if number in denied else ALLOW
        assert verdict(program, arch=arch, number=number) == expected, number


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_clone_is_refused_for_namespaces_only(machine: str) -> None:
    program = seccomp.assemble(machine)
    arch, clone, _ = seccomp._ARCHITECTURE[machine]
    thread = 0x3D0F00
    assert verdict(program, arch=arch, number=clone, arguments=(thread, 0, 0, 0, 0, 0)) == ALLOW
    for flag in (namespaces.CLONE_NEWUSER, namespaces.CLONE_NEWNS, namespaces.CLONE_NEWPID, namespaces.CLONE_NEWNET):
        assert verdict(program, arch=arch, number=clone, arguments=(thread | flag, 0, 0, 0, 0, 0)) == EPERM


def test_terminal_injection_is_refused_and_other_ioctls_pass() -> None:
    program = seccomp.assemble("x86_64")
    arch, _, ioctl = seccomp._ARCHITECTURE["x86_64"]
    assert verdict(program, arch=arch, number=ioctl, arguments=(0, 0x5412, 0, 0, 0, 0)) == EPERM
    assert verdict(program, arch=arch, number=ioctl, arguments=(0, 0x5413, 0, 0, 0, 0)) == ALLOW


def test_foreign_architecture_and_x32_do_not_pass() -> None:
    program = seccomp.assemble("x86_64")
    assert verdict(program, arch=0x40000003, number=0) == KILL
    assert verdict(program, arch=0xC000003E, number=0x40000000) == EPERM


def test_unknown_machine_fails_closed() -> None:
    with pytest.raises(OSError, match="no seccomp table for vax"):
        seccomp.assemble("vax")

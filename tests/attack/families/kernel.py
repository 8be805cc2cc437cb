"""Attacks on kernel interfaces: privileges, namespaces, mounts, clocks, modules, BPF, other entry points, /proc and
/sys."""

from __future__ import annotations

from collections.abc import Sequence

from ..attack import Attack, Family, Verdict

REFUSED, HARMLESS, ENDED = Verdict.REFUSED, Verdict.HARMLESS, Verdict.ENDED


def _calls(name: str, calls: Sequence[tuple[str, str]], *, quick: bool = False) -> Attack:
    """Raw system calls, each with the kernel's reply to root without a filter: success or an error of the arguments."""
    source = "\n".join(f"probe('{call.split(',')[0]}', lambda: raw('{_quoted(call)}))" for call, _ in calls)
    return Attack(
        name=name,
        verdict=REFUSED,
        quick=quick,
        source=source,
        held=[f"{call.split(',')[0]} {{no}}" for call, _ in calls],
        free=[f"{call.split(',')[0]} ({free})" for call, free in calls],
    )


def _quoted(call: str) -> str:
    name, _, arguments = call.partition(",")
    return f"{name}'" + (f",{arguments}" if arguments else "")


_NAMESPACES = ("0x20000", "0x2000000", "0x4000000", "0x8000000", "0x10000000", "0x20000000", "0x40000000")

PRIVILEGES = (
    Attack(
        name="become root", verdict=REFUSED, quick=True,
        source="probe('setuid', lambda: os.setuid(0))\nprobe('setresuid', lambda: os.setresuid(0, 0, 0))\n"
        "probe('setgid', lambda: os.setgid(0))\nprobe('setgroups', lambda: os.setgroups([0]))",
        held=["setuid (EPERM|EINVAL)", "setresuid (EPERM|EINVAL)", "setgid (EPERM|EINVAL)", "setgroups {no}"],
        free=["setuid got None", "setresuid got None", "setgid got None", "setgroups got None"],
    ),
    Attack(
        name="become another session's uid", verdict=REFUSED,
        source="probe('next', lambda: os.setresuid(os.getuid() + 1, os.getuid() + 1, os.getuid() + 1))",
        held=["next (EPERM|EINVAL)"], free=["next got None"],
    ),
    Attack(
        name="regain capabilities", verdict=REFUSED, quick=True,
        source="""
            header = (ctypes.c_uint32 * 2)(0x20080522, 0)
            full = (ctypes.c_uint32 * 6)(*[0xFFFFFFFF] * 6)
            held = (ctypes.c_uint32 * 6)()
            _libc.capget(header, held)
            print('capabilities', list(held) == [0] * 6)
            probe('set', lambda: libc('capset', header, full))
            probe('ambient', lambda: libc('prctl', 47, 2, 21, 0, 0))
            probe('bounding', lambda: libc('prctl', 23, 21, 0, 0, 0))
            """,
        held=["capabilities True", "set {no}", "ambient {no}", "bounding got 0"],
        free=["capabilities False", "set .*", "ambient .*", "bounding got 1"],
    ),
    Attack(
        name="undo no_new_privs and the filter", verdict=REFUSED, quick=True,
        source="print('no_new_privs', libc('prctl', 39, 0, 0, 0, 0), 'seccomp', libc('prctl', 21, 0, 0, 0, 0))\n"
        "probe('undo', lambda: libc('prctl', 38, 0, 0, 0, 0))\n"
        "probe('relax', lambda: libc('prctl', 22, 0, 0, 0, 0))\nprobe('keep', lambda: libc('prctl', 8, 1, 0, 0, 0))",
        held=["no_new_privs 1 seccomp 2", "undo (EINVAL|{no})", "relax (EINVAL|{no})", "keep (got 0|{no})"],
        free=["no_new_privs 0 seccomp 0", "undo EINVAL", "relax EINVAL", "keep got 0"],
    ),
    Attack(
        name="raise resource limits", verdict=REFUSED, quick=True,
        source="""
            import resource
            for name in ('AS', 'CPU', 'NPROC', 'FSIZE', 'NOFILE', 'CORE', 'MEMLOCK', 'MSGQUEUE'):
                kind = getattr(resource, 'RLIMIT_' + name, 12)
                probe(name, lambda: resource.setrlimit(kind, (resource.RLIM_INFINITY if name != 'NOFILE' else 4096,) * 2))
            probe('other', lambda: resource.prlimit(VICTIM_PID, resource.RLIMIT_NOFILE, (1, 1)))
            """,
        held=[*["[A-Z]+ (ValueError|{no})"] * 8, "other ({gone}|{no})"],
    ),
    Attack(
        name="real-time priority, negative nice, io priority", verdict=REFUSED,
        source="""
            probe('fifo', lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50)))
            probe('rr', lambda: os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1)))
            probe('nice', lambda: os.setpriority(os.PRIO_PROCESS, 0, -20))
            probe('io', lambda: raw('ioprio_set', 1, 0, 1 << 13))
            """,
        held=["fifo {no}", "rr {no}", "nice {no}", "io {no}"], free=["fifo .*", "rr .*", "nice got None", "io got 0"],
    ),
    _calls("ports of the hardware", [("iopl, 3", "got 0|ENOSYS"), ("ioperm, 128, 1, 1", "got 0|ENOSYS|EINVAL")]),
    _calls("segment tables and personality", [("modify_ldt, 0, 0, 0", "got 0|ENOSYS"),
                                              ("personality, 0x0040000", "got .*")], quick=True),
)  # fmt: skip

DOORS = (
    _calls("new namespaces by unshare", [(f"unshare, {flag}", "got 0") for flag in _NAMESPACES[:5]], quick=True),
    Attack(
        name="new namespaces by clone", verdict=REFUSED, quick=True,
        source="""
            def clone(flag):
                pid = raw('clone', flag | signal.SIGCHLD, 0, 0, 0, 0)
                if pid == 0:
                    os._exit(0)
                return os.waitpid(pid, 0)[1]
            sys.stdout.flush()
            for flag in (0x20000, 0x10000000, 0x20000000, 0x40000000):
                probe('clone', lambda: clone(flag))
            """,
        held=["clone {no}"] * 4, free=["clone got 0"] * 4,
    ),
    Attack(
        name="new namespaces by clone3, whose flags no filter reads", verdict=REFUSED, quick=True,
        source="""
            def clone3():
                wanted = struct.pack('<11Q', 0x10000000, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, 0)
                pid = raw('clone3', wanted, len(wanted))
                if pid == 0:
                    os._exit(0)
                return os.waitpid(pid, 0)[1]
            probe('clone3', clone3)
            """,
        held=["clone3 {no}"], free=["clone3 got 0"],
    ),
    Attack(
        name="join namespaces of others", verdict=REFUSED,
        source="fd = os.open('/', os.O_RDONLY)\nprobe('setns', lambda: raw('setns', fd, 0x20000))\n"
        "probe('pidfd', lambda: raw('setns', os.pidfd_open(os.getpid()), 0x20000))",
        held=["setns {no}", "pidfd {no}"], free=["setns EINVAL", "pidfd (got 0|EINVAL|EPERM)"],
    ),
    Attack(
        name="mounts, old interface", verdict=REFUSED, quick=True,
        source="""
            os.mkdir('m')
            here = os.path.abspath('m').encode()
            probe('tmpfs', lambda: raw('mount', b'none', here, b'tmpfs', 0, 0))
            probe('bind', lambda: raw('mount', b'/', here, 0, 4096, 0))
            probe('writable', lambda: raw('mount', b'none', here, 0, 32 | 4096, 0))
            probe('proc', lambda: raw('mount', b'proc', here, b'proc', 0, 0))
            probe('umount', lambda: raw('umount2', here, 2))
            probe('pivot', lambda: raw('pivot_root', here, here))
            """,
        held=["tmpfs {no}", "bind {no}", "writable {no}", "proc {no}", "umount {no}", "pivot {no}"],
        free=["tmpfs got 0", "bind got 0", "writable (got 0|E.*)", "proc got 0", "umount got 0", "pivot .*"],
    ),
    _calls("mounts, new interface", [("open_tree, -100, b'/', 1", "got .*"), ("fsopen, b'tmpfs', 0", "got .*"),
                                     ("move_mount, -1, b'', -1, b'', 4", "EBADF|ENOENT|EINVAL"),
                                     ("mount_setattr, -1, b'', 0, 0, 0", "EINVAL|EBADF")]),
    _calls("clocks of the host", [("settimeofday, 0, 0", "got 0"), ("clock_settime, 0, 0", "EFAULT"),
                                  ("adjtimex, bytes(208)", "got .*")], quick=True),
    _calls("names, accounting, swap, quotas", [("sethostname, b'', -1", "EINVAL"), ("acct, 0", "got 0|ENOSYS"),
                                               ("swapon, b'/none', 0", "ENOENT|ENOSYS"), ("quotactl, -1, 0, 0, 0", "E.*")]),
    _calls("reboot, kexec and modules", [("reboot, 0, 0, 0, 0", "EINVAL"), ("kexec_load, 0, 17, 0, 1", "E.*"),
                                         ("init_module, 0, 0, b''", "ENOEXEC|EFAULT|ENOSYS"),
                                         ("finit_module, -1, b'', 0", "EBADF|ENOSYS"),
                                         ("delete_module, b'none', 0", "ENOENT|ENOSYS")], quick=True),
    _calls("BPF, perf, userfaultfd", [("bpf, 99, 0, 0", "EINVAL|ENOSYS"), ("perf_event_open, 0, 0, -1, -1, 0", "E.*"),
                                      ("userfaultfd, 0", "got .*|ENOSYS")], quick=True),
    _calls("io_uring and kernel aio", [("io_uring_setup, 1, bytes(120)", "got .*|ENOSYS|EPERM|EFAULT"),
                                       ("io_setup, 1, bytes(8)", "got 0|EINVAL")], quick=True),
    _calls("the kernel log and watches on every file", [("syslog, 10, 0, 0", "got .*"), ("fanotify_init, 0, 0", "got .*|ENOSYS")]),
    Attack(
        name="watches on files that all sessions share", verdict=REFUSED, quick=True,
        source="""
            import fcntl
            probe('inotify', lambda: raw('inotify_init1', 0))
            probe('watch', lambda: raw('inotify_add_watch', -1, b'/usr/bin', 0x20))
            signal.signal(signal.SIGIO, signal.SIG_IGN)
            folder = os.open('/usr/bin', os.O_RDONLY)
            for command in (1026, 1026 | 0xABC << 32):
                probe('F_NOTIFY', lambda: libc('fcntl', folder, ctypes.c_long(command), ctypes.c_long(1)))
            """,
        held=["inotify {no}", "watch {no}", *["F_NOTIFY {no}"] * 2],
        free=["inotify got .*", "watch EBADF", *["F_NOTIFY (got 0|EINVAL)"] * 2],
    ),
    Attack(
        name="programs attached to sockets", verdict=REFUSED, quick=True,
        source="""
            socket_fd = socket.socketpair()[0].detach()
            code = (ctypes.c_uint64 * 1)(0x06)
            program = struct.pack('HxxxxxxQ', 1, ctypes.addressof(code))
            for option in (26, 50, 51, 52, 26 | 0xABC << 32):
                probe('attach', lambda: raw('setsockopt', socket_fd, 1, option, program, len(program)))
            probe('detach', lambda: raw('setsockopt', socket_fd, 1, 27, bytes(4), 4))
            probe('lock', lambda: raw('setsockopt', socket_fd, 1, 44, bytes(4), 4))
            """,
        held=["attach {no}"] * 5 + ["detach {no}", "lock {no}"],
        free=["attach got 0", *["attach E.*"] * 3, "attach got 0", "detach got 0", "lock (got 0|E.*)"],
    ),
    _calls("waiting for the host's disks", [("sync,", "got 0"), ("syncfs, 0", "got 0|EBADF")]),
    _calls("what the host's page cache holds", [("fadvise64, 0, 0, 0, 4", "got 0|ESPIPE|EBADF"),
                                                ("preadv2, 0, 0, 0, 0, 0, 8", "got 0|EOPNOTSUPP|ESPIPE")]),
    Attack(
        name="system calls of the x32 table", verdict=REFUSED, quick=True,
        source="NUMBERS.update({'x32 getpid': 0x40000027, 'x32 socket': 0x40000029})\n"
        "for call in (('x32 getpid',), ('x32 socket', 2, 1, 0)):\n"
        "    said, status = in_child(lambda: raw(*call))\n"
        "    print('killed' if status & 127 == signal.SIGSYS else said)",
        held=["(killed|{no})"] * 2, free=["[0-9]+|ENOSYS"] * 2,
    ),
    Attack(
        name="system calls of the 32-bit table by int 0x80", verdict=REFUSED, quick=True,
        source="""
            import mmap
            # mov eax, 20 (getpid of the 32-bit table); int 0x80; ret
            code = bytes([0x53, 0xB8, 20, 0, 0, 0, 0xCD, 0x80, 0x5B, 0xC3])
            def enter():
                page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
                page.write(code)
                return ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
            said, status = in_child(enter)
            print('killed' if status & 127 in (signal.SIGSYS, signal.SIGSEGV) else 'ran ' + said)
            """,
        held=["killed"], free=["(ran [0-9]+|killed)"],
    ),
    Attack(
        name="upper halves of arguments past the filter", verdict=REFUSED,
        source="high = 0xABC << 32\nprobe('socket', lambda: raw('socket', high | 2, high | 1, 0))\n"
        "def clone():\n    pid = raw('clone', high | 0x10000000 | 17, 0, 0, 0, 0)\n"
        "    return pid or os._exit(0)\nsys.stdout.flush()\nprobe('clone', clone)",
        held=["socket {no}", "clone ({no}|EINVAL)"], free=["socket got .*", "clone .*"],
    ),
    Attack(
        name="type into another process's terminal", verdict=REFUSED,
        source="import fcntl\nprobe('TIOCSTI', lambda: fcntl.ioctl(0, 0x5412, b'x'))\nprobe('TIOCLINUX', lambda: fcntl.ioctl(0, 0x541C, b'x'))",
        held=["TIOCSTI {no}", "TIOCLINUX {no}"], free=["TIOCSTI ENOTTY", "TIOCLINUX ENOTTY"],
    ),
    Attack(
        name="core dumps", verdict=HARMLESS,
        source="""
            import resource
            print('limit', resource.getrlimit(resource.RLIMIT_CORE))
            print(*in_child(lambda: os.kill(os.getpid(), signal.SIGABRT)))
            print('left', [name for name in os.listdir('.') if name.startswith('core')])
            """,
        held=[r"limit \(1, 1\)", " ?6", r"left \[\]"],
    ),
)  # fmt: skip

_PROC = ("/proc", "/proc/self", "/proc/1/environ", "/proc/1/root", "/proc/self/exe", "/proc/sys/kernel/core_pattern",
         "/proc/sysrq-trigger", "/proc/kcore", "/proc/keys", "/proc/mounts", "/proc/self/fd", "/proc/thread-self")  # fmt: skip
_SYS = ("/sys", "/sys/kernel", "/sys/fs/cgroup", "/sys/kernel/debug", "/sys/firmware", "/sys/class/net", "/sys/module",
        "/sys/fs/bpf", "/sys/kernel/uevent_helper", "/sys/power/state")  # fmt: skip


def _absent(name: str, paths: Sequence[str], *, quick: bool = False) -> Attack:
    return Attack(
        name=name,
        verdict=REFUSED,
        quick=quick,
        source=f"for path in {tuple(paths)!r}:\n    probe('stat', lambda: bool(os.lstat(path)))",
        held=["stat {absent}"] * len(paths),
        free=["stat (got True|ENOENT)"] * len(paths),
    )


PROC = (
    _absent("anything in /proc", _PROC, quick=True),
    _absent("anything in /sys", _SYS, quick=True),
    Attack(
        name="descriptors by /proc and /dev/fd", verdict=REFUSED,
        source="for path in ('/proc/self/fd/1', '/dev/fd/1', '/dev/stdout', '/proc/%d/fd/3' % SERVICE_PID, '/proc/1/fd/3'):\n"
        "    probe('open', lambda: os.open(path, os.O_RDWR))",
        held=["open {absent}"] * 5, free=["open .*"] * 5,
    ),
    Attack(
        name="overwrite the interpreter's own program (CVE-2019-5736)", verdict=REFUSED,
        source="probe('exe', lambda: os.open('/proc/self/exe', os.O_RDONLY))\n"
        "probe('program', lambda: os.open(os.path.realpath(sys.executable or '/usr/bin/python3'), os.O_WRONLY))\n"
        "probe('shell', lambda: os.open(os.path.realpath('/bin/sh'), os.O_WRONLY))",
        held=["exe {absent}", "program {readonly}", "shell {readonly}"], free=["exe got .*", "program .*", "shell .*"],
    ),
)  # fmt: skip

PRIVILEGE_FAMILY = Family(name="privileges", attacks=PRIVILEGES)
DOOR_FAMILY = Family(name="kernel", attacks=DOORS)
PROC_FAMILY = Family(name="/proc and /sys", attacks=PROC)

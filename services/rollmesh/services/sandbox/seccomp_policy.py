"""The system calls that a session may make: an allow list that libseccomp compiles to BPF, once per node.

A call that is not listed returns ENOSYS, so that a newer libc falls back to older calls. A call that is known to be
dangerous returns EPERM. `clone3` returns ENOSYS too, because its flags are in memory, where no filter can read them;
libc then uses `clone`, whose flags are checked. Calls of a foreign architecture kill the process. Arguments of which
the kernel reads 32 bits are compared in 32 bits, because otherwise a set upper half would evade the comparison.

The list contains the calls that python, bash, gcc, g++, node, sqlite, duckdb and numpy were observed to need, and
similar calls. It excludes other processes' memory, mounts, namespaces, kernel modules, keys, clocks, BPF (also as a
socket option), io_uring, memory that no limit counts (memfd, System V), watches on files that the host and other
sessions share (inotify, dnotify), calls that wait for the host's disks (sync), calls that read or change its page cache
(fadvise, preadv2), and sockets except connected pairs. A session gets network access only as a connected descriptor.

Record locks stay allowed, although the kernel counts them in no limit: sqlite and duckdb cannot open a database without
them, and a faked lock would corrupt databases that two processes write. Their cost grows with their number, and they
end with the session.

If a session shares its uid with other processes and no namespace hides them (`shares_uid`), the uid permits operations
that neither Landlock nor signal scoping prevents: limits and priorities of other processes, and modes, owners and times
of files. The filter then allows the first for the caller alone and rejects the second.

The service compiles the filter and the jail installs it (`rollmesh.sandbox_runtime.seccomp`). Not covered: kernel bugs
behind allowed calls.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import functools
import platform
import tempfile
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from rollmesh.sandbox_runtime import namespaces
from rollmesh.shared.errors import SandboxFailed

REMEDY = "install libseccomp 2.5 or later (Debian, Ubuntu: apt install libseccomp2; Fedora: dnf install libseccomp)"


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_FILES = """
    access chdir chmod chown close close_range copy_file_range creat dup dup2 dup3 faccessat faccessat2 fallocate fchdir fchmod
    fchmodat fchmodat2 fchown fchownat fdatasync fgetxattr flistxattr flock fstat fstatfs fsync ftruncate futimesat getcwd
    getdents getdents64 getxattr lchown lgetxattr link linkat listxattr llistxattr lseek lstat mkdir mkdirat newfstatat open
    openat openat2 pread64 preadv pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv rename renameat renameat2
    rmdir sendfile splice stat statfs statx symlink symlinkat sync_file_range tee truncate umask unlink unlinkat utime
    utimensat utimes write writev
"""  # noqa: E501
_WAITING = """
    epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 pause pipe pipe2
    poll ppoll pselect6 select signalfd signalfd4
"""  # noqa: E501
_MEMORY = """
    brk madvise mincore mlock mlock2 mlockall mmap mprotect mremap msync munlock munlockall munmap
"""
_PROCESSES = """
    arch_prctl capget execve execveat exit exit_group fork futex futex_waitv get_robust_list get_thread_area getcpu getegid
    geteuid getgid getgroups getpgid getpgrp getpid getppid getpriority getresgid getresuid getrlimit getrusage getsid gettid
    getuid kill membarrier pidfd_open pidfd_send_signal prlimit64 restart_syscall rseq rt_sigaction rt_sigpending rt_sigprocmask
    rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max
    sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval
    sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield set_robust_list set_tid_address setfsgid
    setfsuid setgid setgroups setpgid setpriority setregid setresgid setresuid setreuid setrlimit setsid setuid sigaltstack
    tgkill time times tkill uname sysinfo vfork wait4 waitid getrandom
"""  # noqa: E501
_TIME = """
    alarm clock_getres clock_gettime clock_nanosleep getitimer gettimeofday nanosleep setitimer timer_create timer_delete
    timer_getoverrun timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime
"""  # noqa: E501
_PAIRED_SOCKETS = """
    getpeername getsockname getsockopt recvfrom recvmmsg recvmsg sendmmsg sendmsg sendto shutdown
"""
ALLOWED = _words(f"{_FILES} {_WAITING} {_MEMORY} {_PROCESSES} {_TIME} {_PAIRED_SOCKETS}")
"""Calls that are allowed with any arguments."""

REFUSED = _words("""
    accept accept4 acct add_key adjtimex bind bpf chroot clock_adjtime clock_settime connect delete_module fanotify_init
    fanotify_mark finit_module fsconfig fsmount fsopen fspick get_mempolicy init_module inotify_add_watch inotify_init
    inotify_init1 inotify_rm_watch io_cancel io_destroy
    io_getevents io_pgetevents io_setup io_submit io_uring_enter io_uring_register io_uring_setup ioperm iopl kcmp
    kexec_file_load kexec_load keyctl listen lookup_dcookie mbind memfd_create memfd_secret migrate_pages modify_ldt
    mount mount_setattr move_mount move_pages msgctl msgget msgrcv msgsnd name_to_handle_at open_by_handle_at
    open_tree perf_event_open personality pidfd_getfd pivot_root process_madvise process_vm_readv process_vm_writev
    ptrace quotactl quotactl_fd reboot request_key seccomp semctl semget semop semtimedop set_mempolicy
    setdomainname sethostname setns settimeofday shmat shmctl shmdt shmget socket stime swapoff swapon sync syncfs syslog umount
    umount2 unshare uselib userfaultfd vhangup vmsplice
""")  # noqa: E501
"""Calls that return EPERM. All other calls return ENOSYS."""

UNSUPPORTED = ("setxattr", "lsetxattr", "fsetxattr", "removexattr", "lremovexattr", "fremovexattr")
"""Calls that return EOPNOTSUPP, as on a file system without extended attributes, because no limit counts their bytes.
`cp -p` then continues without them."""

_FILE_OWNERS = frozenset(
    _words("""
    chmod chown fchmod fchmodat fchmodat2 fchown fchownat futimesat lchown utime utimensat utimes
""")
)
_PROCESS_OWNERS = frozenset(
    _words("""
    prlimit64 sched_setaffinity sched_setattr sched_setparam sched_setscheduler setpriority
""")
)
"""Calls that the ownership of a file or a process permits."""

_IOCTLS = (
    0x5401, 0x5402, 0x5403, 0x5404,  # TCGETS, TCSETS, TCSETSW, TCSETSF
    0x5409, 0x540A, 0x540B,  # TCSBRK, TCXONC, TCFLSH
    0x540E, 0x5422,  # TIOCSCTTY, TIOCNOTTY
    0x540F, 0x5410, 0x5429,  # TIOCGPGRP, TIOCSPGRP, TIOCGSID
    0x5411, 0x541B, 0x5413, 0x5414,  # TIOCOUTQ, FIONREAD, TIOCGWINSZ, TIOCSWINSZ
    0x5421, 0x5450, 0x5451, 0x5452,  # FIONBIO, FIONCLEX, FIOCLEX, FIOASYNC
    0x80045430, 0x40045431, 0x5441,  # TIOCGPTN, TIOCSPTLCK, TIOCGPTPEER
    0x802C542A, 0x402C542B, 0x402C542C, 0x402C542D,  # TCGETS2, TCSETS2, TCSETSW2, TCSETSF2
)  # fmt: skip
_REFUSED_IOCTLS = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX: type into the terminal of another process."""
_PRCTLS = (
    1, 2, 3, 7, 15, 16,  # PDEATHSIG set and get, GET_DUMPABLE, GET_KEEPCAPS, NAME set and get
    # GET_SECCOMP, CAPBSET_READ, GET_SECUREBITS, TIMERSLACK set and get, NO_NEW_PRIVS set and get.
    21, 23, 27, 29, 30, 38, 39,
    0x53564D41,  # SET_VMA: names of anonymous memory, which malloc gives
)  # fmt: skip
_REFUSED_PRCTLS = (4, 8, 22, 24, 28, 35, 36, 47)
"""SET_DUMPABLE, SET_KEEPCAPS, SET_SECCOMP, CAPBSET_DROP, SET_SECUREBITS, SET_MM, SET_CHILD_SUBREAPER, CAP_AMBIENT."""
_NAMESPACES = (
    namespaces.CLONE_NEWNS, namespaces.CLONE_NEWCGROUP, namespaces.CLONE_NEWUTS, namespaces.CLONE_NEWIPC,
    namespaces.CLONE_NEWUSER, namespaces.CLONE_NEWPID, namespaces.CLONE_NEWNET,
)  # fmt: skip
_FCNTLS = 0o77
"""Commands below 64: descriptors, flags, locks, owner and signal. Above are leases, F_NOTIFY (1026) and hints."""
_OTHER_FCNTLS = (1030, 1031, 1032)
"""F_DUPFD_CLOEXEC, F_SETPIPE_SZ, F_GETPIPE_SZ."""
_SOCKET_LEVEL = 1
_SOCKET_OPTIONS = ((0xFFFFFFF0, 0), (0xFFFFFFF8, 16))
"""Masks and values of allowed options: 0 to 15 and 16 to 23, among them buffer sizes, credentials and timeouts. Options
above attach programs."""
_FILE_KIND, _FIFO, _REGULAR, _DEVICES = 0o170000, 0o010000, 0o100000, (0o020000, 0o060000)
_INT = 0xFFFFFFFF
_UNIX = 1
_PAIR_TYPES, _OTHER_TYPES = (1, 5), (2, 3, 4)
"""Stream and sequenced-packet sockets; datagram, raw and reliable-datagram sockets."""
_TYPE = 0xF
"""Mask of the socket type without the flags for close-on-exec and non-blocking."""


class _Version(ctypes.Structure):
    _fields_ = (("major", ctypes.c_uint), ("minor", ctypes.c_uint), ("micro", ctypes.c_uint))


def library_version() -> str:
    """Return the version of libseccomp. Raises SandboxFailed if it is missing."""
    _binding()
    lib = ctypes.CDLL(ctypes.util.find_library("seccomp"))
    lib.seccomp_version.restype = ctypes.POINTER(_Version)
    found = lib.seccomp_version().contents
    return f"{found.major}.{found.minor}.{found.micro}"


@functools.cache
def compiled(machine: str = "", *, shares_uid: bool = False) -> bytes:
    """Return the filter as BPF, 8 bytes per instruction, for a `machine` as named by uname (default: this host). Raises
    SandboxFailed with the remedy."""
    try:
        return _Compiler(_binding(), machine or platform.machine()).compile(shares_uid=shares_uid)
    except (OSError, ValueError) as error:
        raise SandboxFailed(f"cannot compile the seccomp filter: {error}; {REMEDY}") from error


def _binding() -> ModuleType:
    try:
        import pyseccomp
    except (ImportError, RuntimeError, OSError, AttributeError) as error:
        raise SandboxFailed(f"seccomp needs libseccomp, which does not load here ({error}); {REMEDY}") from error
    return pyseccomp  # type: ignore[no-any-return]


class _Compiler:
    """Builds one filter for one architecture."""

    def __init__(self, binding: ModuleType, machine: str) -> None:
        self._lib: Any = binding
        known = {"x86_64": self._lib.Arch.X86_64, "aarch64": self._lib.Arch.AARCH64}
        if machine not in known:
            raise ValueError(f"no policy for {machine}; known: {', '.join(known)}")
        self._arch = known[machine]
        self._refuse = self._lib.ERRNO(errno.EPERM)
        self._filter = self._lib.SyscallFilter(self._lib.ERRNO(errno.ENOSYS))

    def compile(self, *, shares_uid: bool) -> bytes:
        self._prepare()
        owners = _FILE_OWNERS | _PROCESS_OWNERS if shares_uid else frozenset()
        for name in ALLOWED:
            if name not in owners:
                self._rule(self._lib.ALLOW, name)
        if shares_uid:
            self._owners()
        for name in REFUSED:
            self._rule(self._refuse, name)
        for name in UNSUPPORTED:
            self._rule(self._lib.ERRNO(errno.EOPNOTSUPP), name)
        self._processes()
        self._only_values("ioctl", 1, _INT, _IOCTLS, _REFUSED_IOCTLS)
        self._only_values("prctl", 0, _INT, _PRCTLS, _REFUSED_PRCTLS)
        self._only_values("mknod", 1, _FILE_KIND, (0, _FIFO, _REGULAR), _DEVICES)
        self._only_values("mknodat", 2, _FILE_KIND, (0, _FIFO, _REGULAR), _DEVICES)
        self._socket_pairs()
        self._rule(self._lib.ALLOW, "fcntl", self._when(1, _INT & ~_FCNTLS, 0))
        self._only_values("fcntl", 1, _INT, _OTHER_FCNTLS, ())
        with tempfile.TemporaryFile() as file:
            self._filter.export_bpf(file)
            file.seek(0)
            return file.read()

    def _prepare(self) -> None:
        native = self._lib.system_arch()
        if native != self._arch:
            self._filter.add_arch(self._arch)
            self._filter.remove_arch(native)
        self._filter.set_attr(self._lib.Attr.ACT_BADARCH, self._lib.KILL_PROCESS)
        # A binary search over the calls instead of a list of comparisons.
        self._filter.set_attr(self._lib.Attr.CTL_OPTIMIZE, 2)

    def _rule(self, action: int, name: str, *conditions: object) -> None:
        """Add a rule. Calls that the architecture or this libseccomp lacks are skipped; they return ENOSYS."""
        if self._lib.resolve_syscall(self._arch, name) >= 0:
            self._filter.add_rule(action, name, *conditions)

    def _when(self, argument: int, mask: int, value: int) -> object:
        return self._lib.Arg(argument, self._lib.MASKED_EQ, mask, value)

    def _only_values(self, name: str, argument: int, mask: int, allowed: Iterable[int], refused: Iterable[int]) -> None:
        for value in allowed:
            self._rule(self._lib.ALLOW, name, self._when(argument, mask, value))
        for value in refused:
            self._rule(self._refuse, name, self._when(argument, mask, value))

    def _owners(self) -> None:
        """Reject owner operations on files, and allow those on processes only for the caller, which is number 0."""
        for name in _FILE_OWNERS:
            self._rule(self._refuse, name)
        for name in _PROCESS_OWNERS - {"setpriority"}:
            self._rule(self._lib.ALLOW, name, self._when(0, _INT, 0))
        self._rule(self._lib.ALLOW, "setpriority", self._when(0, _INT, 0), self._when(1, _INT, 0))

    def _processes(self) -> None:
        """Allow forks and threads without new namespaces."""
        self._rule(self._lib.ALLOW, "clone", self._when(0, sum(_NAMESPACES), 0))
        for flag in _NAMESPACES:
            self._rule(self._refuse, "clone", self._when(0, flag, flag))

    def _socket_pairs(self) -> None:
        """Allow connected socket pairs of the Unix family. Datagram pairs are rejected, because they can name any
        address of their network namespace."""
        family = self._lib.Arg(0, self._lib.EQ, _UNIX)
        for kind in _PAIR_TYPES:
            self._rule(self._lib.ALLOW, "socketpair", family, self._when(1, _TYPE, kind))
        for kind in _OTHER_TYPES:
            self._rule(self._refuse, "socketpair", family, self._when(1, _TYPE, kind))
        self._rule(self._refuse, "socketpair", self._lib.Arg(0, self._lib.NE, _UNIX))
        for mask, value in _SOCKET_OPTIONS:
            self._rule(self._lib.ALLOW, "setsockopt", self._when(1, _INT, _SOCKET_LEVEL), self._when(2, mask, value))

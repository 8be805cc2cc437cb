"""Exhaust shared resources: processes, threads, memory, disk, inodes, descriptors, and kernel memory of a process."""

from __future__ import annotations

from ..attack import Attack, Family, Verdict

REFUSED, HARMLESS = Verdict.REFUSED, Verdict.HARMLESS

PROCESSES = (
    Attack(
        name="fork bomb", verdict=Verdict.PROCESSES, quick=True, alive=False,
        source="print('started')\nwhile True:\n    os.fork()",
    ),
    Attack(
        name="fork bomb that swallows its errors", verdict=Verdict.TIME, wall_s=0.5,
        source="while True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    ),
    Attack(
        name="fork bomb of a shell", verdict=HARMLESS, wall_s=15.0,
        source="""
            script = 'i=0; while [ $i -lt 60 ]; do sleep 60 >/dev/null 2>&1 & i=$((i+1)); done'
            print('refused', run_program('/bin/sh', '-c', script)[0] != 0)
            """,
        held=["refused True"],
    ),
    Attack(
        name="thread bomb", verdict=Verdict.PROCESSES, quick=True, alive=False,
        source="import threading\nwhile True:\n    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    ),
    Attack(
        name="how many children", verdict=HARMLESS, quick=True,
        source="""
            made = 0
            try:
                for _ in range(40):
                    if os.fork() == 0:
                        time.sleep(2)
                        os._exit(0)
                    made += 1
            except OSError as error:
                print(errno.errorcode[error.errno])
            print('few' if made < 12 else 'many')
            """,
        held=["EAGAIN", "few"], free=["many"],
    ),
    Attack(
        name="zombies never waited for", verdict=HARMLESS,
        source="""
            made = 0
            try:
                while made < 1000:
                    if os.fork() == 0:
                        os._exit(0)
                    made += 1
            except OSError as error:
                print(errno.errorcode[error.errno])
            print('few' if made < 12 else 'many')
            """,
        held=["EAGAIN", "few"],
    ),
    Attack(
        name="daemons that leave session and parent", verdict=HARMLESS, quick=True,
        source="""
            for _ in range(4):
                if os.fork() == 0:
                    os.setsid()
                    if os.fork() == 0:
                        for number in (1, 2, 3, 15):
                            signal.signal(number, signal.SIG_IGN)
                        time.sleep(600)
                    os._exit(0)
            print('left behind')
            """,
        held=["left behind"],
    ),
    Attack(
        name="children that answer for the session", verdict=HARMLESS, alive=True,
        source="sys.stdout.flush()\npid = os.fork()\nif pid:\n    os.waitpid(pid, 0)\n    print('parent')",
        held=["parent"],
    ),
    Attack(
        name="vfork and exec without end", verdict=Verdict.TIME, wall_s=0.5,
        source="import subprocess\nwhile True:\n    subprocess.run(['/bin/true'])",
    ),
)  # fmt: skip

MEMORY = (
    Attack(
        name="heap", verdict=Verdict.MEMORY, wall_s=15.0, quick=True,
        source="kept = [bytearray(b'x' * (1 << 20)) for _ in range(300)]\nprint('held', len(kept))", free=["held 300"],
    ),
    Attack(
        name="one huge object", verdict=Verdict.MEMORY, wall_s=15.0,
        source="kept = [0] * (1 << 25)\nprint('held', len(kept))", free=["held 33554432"],
    ),
    Attack(
        name="anonymous mappings", verdict=Verdict.MEMORY, wall_s=15.0,
        source="import mmap\nkept = [mmap.mmap(-1, 8 << 20) for _ in range(40)]\n"
        "for page in kept:\n    page.write(bytes(8 << 20))\nprint('held', len(kept))",
        free=["held 40"],
    ),
    Attack(
        name="address space without memory", verdict=Verdict.MEMORY,
        source="import mmap\nkept = mmap.mmap(-1, 1 << 40, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)",
    ),
    Attack(
        name="shared mappings of many processes", verdict=HARMLESS, wall_s=15.0, needs="memory cgroup",
        source="""
            import mmap
            for _ in range(8):
                if os.fork() == 0:
                    page = mmap.mmap(-1, 60 << 20)
                    for at in range(0, 60 << 20, 4096):
                        page[at] = 1
                    time.sleep(1)
                    os._exit(0)
            ends = [os.wait()[1] for _ in range(8)]
            print('killed', ends.count(9) > 0)
            """,
        held=["killed True"],
    ),
    Attack(
        name="memory of children until the first process is killed", verdict=Verdict.MEMORY, wall_s=15.0, needs="memory cgroup",
        alive=False,
        source="""
            reading, writing = os.pipe()
            for _ in range(4):
                if os.fork() == 0:
                    os.read(reading, 1)
                    kept = b'x' * (25 << 20)
                    time.sleep(10)
                    os._exit(0)
            kept = b'x' * (50 << 20)
            os.write(writing, b'xxxx')
            signal.pause()
            """,
    ),
    Attack(
        name="files in memory and heap together", verdict=HARMLESS, wall_s=15.0,
        source="""
            def fill():
                for number in range(40):
                    write('f%d' % number, bytes(1 << 20))
            def hold():
                kept = [bytearray(b'x' * (1 << 20)) for _ in range(300)]
            probe('files', fill)
            probe('heap', hold)
            """,
        held=["files ENOSPC", "heap MemoryError"], free=["files got None", "heap got None"],
    ),
    Attack(
        name="lock memory", verdict=REFUSED, quick=True,
        source="import mmap\npage = mmap.mmap(-1, 1 << 20)\naddress = ctypes.addressof(ctypes.c_char.from_buffer(page))\n"
        "probe('lock', lambda: libc('mlock', ctypes.c_void_p(address), ctypes.c_size_t(1 << 20)))\n"
        "probe('all', lambda: libc('mlockall', 3))",
        held=["lock (ENOMEM|{no})", "all (ENOMEM|{no})"], free=["lock got 0", "all got 0"],
    ),
    Attack(
        name="the C stack", verdict=Verdict.ENDED, alive=False,
        source="""
            sys.setrecursionlimit(10**9)
            class Deep:
                def __getattr__(self, name):
                    return getattr(self, name + 'x') if len(name) < 0 else repr(self)
                __repr__ = lambda self: str(self) + ascii(self)
                __str__ = lambda self: ascii(self)
            repr(Deep())
            """,
    ),
    Attack(
        name="recursion without end", verdict=HARMLESS, quick=True,
        source="def deep():\n    return deep()\nprobe('deep', deep)", held=["deep RecursionError"],
    ),
    Attack(
        name="kernel memory by pipes and sockets", verdict=HARMLESS, wall_s=15.0,
        source="""
            import fcntl
            kept, held = [], 0
            try:
                while len(kept) < 2000:
                    reader, writer = os.pipe()
                    kept += [reader, writer]
                    try:
                        fcntl.fcntl(writer, 1031, 1 << 20)
                    except OSError:
                        pass
                    os.set_blocking(writer, False)
                    try:
                        while True:
                            held += os.write(writer, bytes(65536))
                    except BlockingIOError:
                        pass
            except OSError as error:
                print(errno.errorcode[error.errno])
            print('bounded', held < 96 << 20)
            """,
        held=["(EMFILE|ENFILE|ENOMEM)", "bounded True"],
    ),
    Attack(
        name="decompression bomb inside", verdict=Verdict.MEMORY, wall_s=15.0,
        source="""
            import zlib
            packer = zlib.compressobj(1)
            packed = b''.join(packer.compress(bytes(1 << 20)) for _ in range(150)) + packer.flush()
            print(len(zlib.decompress(packed)) >> 20)
            """,
        free=["150"],
    ),
)  # fmt: skip

DISK = (
    Attack(
        name="fill the disk with bytes", verdict=REFUSED, quick=True,
        source="def fill():\n    for number in range(20):\n        write('f%d' % number, bytes(1 << 20))\nprobe('fill', fill)",
        held=["fill ENOSPC"], free=["fill got None"],
    ),
    Attack(
        name="fill the disk with inodes", verdict=REFUSED, quick=True,
        source="def fill():\n    for number in range(200):\n        write('f%d' % number, b'')\nprobe('fill', fill)",
        held=["fill ENOSPC"], free=["fill got None"],
    ),
    Attack(
        name="directories without end", verdict=REFUSED,
        source="def dig():\n    for _ in range(500):\n        os.mkdir('d')\n        os.chdir('d')\nprobe('dig', dig)",
        held=["dig ENOSPC"], free=["dig got None"],
    ),
    Attack(
        name="one file beyond its limit, whole or sparse", verdict=REFUSED, quick=True,
        source="""
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            probe('whole', lambda: write('big', bytes(3 << 20)))
            probe('sparse', lambda: os.truncate('big', 1 << 40))
            probe('reserve', lambda: os.posix_fallocate(os.open('big', os.O_RDWR), 0, 3 << 20))
            """,
        held=["whole EFBIG", "sparse EFBIG", "reserve (EFBIG|ENOSPC)"], free=["whole got 3145728", "sparse .*", "reserve .*"],
    ),
    Attack(
        name="links and names without inodes", verdict=REFUSED,
        source="def link():\n    write('f', b'')\n    for number in range(100000):\n        os.link('f', 'n%d' % number)\n"
        "def symlink():\n    for number in range(200):\n        os.symlink('x' * 4000, 's%d' % number)\n"
        "probe('link', link)\nprobe('symlink', symlink)",
        held=["link (ENOSPC|EMLINK)", "symlink ENOSPC"],
    ),
    Attack(
        name="files that are deleted but open", verdict=REFUSED,
        source="""
            kept = []
            def hoard():
                for number in range(30):
                    kept.append(open('gone', 'wb'))
                    os.unlink('gone')
                    kept[-1].write(bytes(1 << 20))
                    kept[-1].flush()
            probe('hoard', hoard)
            """,
        held=["hoard ENOSPC"], free=["hoard got None"],
    ),
    Attack(
        name="extended attributes", verdict=REFUSED,
        source="write('f')\ndef fill():\n    for number in range(3000):\n        os.setxattr('f', 'user.%d' % number, bytes(4000))\n"
        "probe('fill', fill)",
        held=["fill (ENOTSUP|ENOSPC|EDQUOT|E2BIG|{no})"],
    ),
    Attack(
        name="descriptors", verdict=REFUSED, quick=True,
        source="kept = []\ndef hoard():\n    while len(kept) < 900:\n        kept.append(os.open('/dev/null', os.O_RDONLY))\n"
        "probe('hoard', hoard)\nkept and [os.close(fd) for fd in kept]\nNone",
        held=["hoard EMFILE"], free=["hoard got None"],
    ),
    Attack(
        name="descriptors parked in a socket", verdict=REFUSED,
        source="""
            a, b = socket.socketpair()
            a.setblocking(False)
            def park():
                for _ in range(2000):
                    socket.send_fds(a, [b'x'], [0] * 50)
            probe('park', park)
            """,
        held=["park (ETOOMANYREFS|EAGAIN|EMFILE|ENOMEM|{no})"],
    ),
    Attack(
        name="timers, watches, event queues and pending signals", verdict=HARMLESS,
        source="""
            def count(make, most):
                made = 0
                try:
                    while made < most:
                        make()
                        made += 1
                except OSError as error:
                    return errno.errorcode[error.errno]
                return made
            import select
            kept = []
            print('epoll', count(lambda: kept.append(select.epoll()), 1000))
            [queue.close() for queue in kept]
            print('watches', count(lambda: kept.append(raw('inotify_init1', 0)), 1000))
            timer = ctypes.c_void_p()
            timers = count(lambda: libc('timer_create', 1, None, ctypes.byref(timer)), 5000)
            print('timers', timers if timers == 'EAGAIN' else 'unbounded')
            """,
        held=["epoll EMFILE", "watches {no}", "timers EAGAIN"],
    ),
)  # fmt: skip

PROCESS_FAMILY = Family(name="fork and thread bombs", attacks=PROCESSES)
MEMORY_FAMILY = Family(name="memory", attacks=MEMORY)
DISK_FAMILY = Family(name="disk, inodes, descriptors", attacks=DISK)

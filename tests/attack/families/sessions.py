"""Attacks on other sessions, the zygote and the service: files, memory, processes, signals and names."""

from __future__ import annotations

from ..attack import Attack, Family, Verdict

REFUSED, HARMLESS, TIME, ENDED = Verdict.REFUSED, Verdict.HARMLESS, Verdict.TIME, Verdict.ENDED

ATTACKS = (
    Attack(
        name="list what other sessions wrote", verdict=HARMLESS, quick=True,
        source="print(sorted(os.listdir('/session')), sorted(os.listdir('/tmp')), os.path.exists('/session/secret'))",
        held=[r"\[\] \[\] False"],
    ),
    Attack(
        name="signal every process number", verdict=HARMLESS, quick=True,
        source="""
            reached = []
            for pid in [*range(2, 5000), VICTIM_PID, SERVICE_PID]:
                try:
                    os.kill(pid, signal.SIGTERM)
                    reached.append(pid)
                except OSError:
                    pass
            print('reached', reached)
            """,
        held=[r"reached \[\]"],
    ),
    Attack(
        name="kill the host's processes by number", verdict=REFUSED,
        source="probe('victim', lambda: os.kill(VICTIM_PID, 0))\nprobe('service', lambda: os.kill(SERVICE_PID, 0))\n"
        "probe('pidfd', lambda: os.pidfd_open(VICTIM_PID))",
        held=["victim {gone}", "service {gone}", "pidfd {gone}"],
    ),
    Attack(
        name="kill everything, from pid 1", verdict=HARMLESS, quick=True,
        source="probe('all', lambda: os.kill(-1, signal.SIGKILL))", held=["all (ESRCH|got None)"],
        free=["all (ESRCH|got None)"],
    ),
    Attack(
        name="kill everything, from a child", verdict=HARMLESS,
        source="print(*in_child(lambda: os.kill(-1, signal.SIGKILL)))\nprint('pid', os.getpid())",
        held=["('ESRCH'|ESRCH|None) (0|9)", "pid 1"],
    ),
    Attack(
        name="kill the process group, which may be the zygote's too", verdict=HARMLESS, quick=True,
        source="""
            for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
                os.kill(0, number)
            os.killpg(0, signal.SIGCONT)
            print('sent')
            """,
        held=["sent"],
    ),
    Attack(
        name="kill the process group permanently", verdict=ENDED,
        source="os.kill(0, signal.SIGKILL)\nos._exit(9)", alive=False,
    ),
    Attack(
        name="stop the process group", verdict=HARMLESS,
        source="""
            def stop():
                os.kill(0, signal.SIGSTOP)
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                stop()
                os._exit(0)
            time.sleep(0.05)
            os.kill(pid, signal.SIGCONT)
            os.waitpid(pid, 0)
            print('on')
            """,
        held=["on"],
    ),
    Attack(
        name="renice the process group and the user", verdict=HARMLESS,
        source="probe('group', lambda: os.setpriority(os.PRIO_PGRP, 0, 15))\n"
        "probe('user', lambda: os.setpriority(os.PRIO_USER, 0, 15))",
        held=["group (got None|{no})", "user (got None|ESRCH|{no})"], free=["group got None", "user got None"],
    ),
    Attack(
        name="kill the session's own pid 1", verdict=HARMLESS,
        source="print(*in_child(lambda: [os.kill(1, number) for number in (9, 19, 15, 1)] and None))\nprint('pid', os.getpid())",
        held=["None 0", "pid 1"],
    ),
    Attack(
        name="join another process group or terminal session", verdict=REFUSED,
        source="probe('group', lambda: os.setpgid(0, VICTIM_PID))\nprobe('session', lambda: os.getsid(VICTIM_PID))\n"
        "probe('terminal', lambda: os.open('/dev/tty', os.O_RDWR))",
        held=["group (EPERM|ESRCH)", "session {gone}", "terminal (ENOENT|ENXIO)"],
    ),
    Attack(
        name="trace a process of the host", verdict=REFUSED, quick=True,
        source="probe('attach', lambda: raw('ptrace', 16, VICTIM_PID, 0, 0))\nprobe('me', lambda: raw('ptrace', 0, 0, 0, 0))",
        held=["attach ({no}|ESRCH)", "me {no}"],
    ),
    Attack(
        name="trace the session's own children", verdict=REFUSED,
        source="print(*in_child(lambda: raw('ptrace', 0, 0, 0, 0)))", held=["{no} 0"], free=["0 0"],
    ),
    Attack(
        name="read another process's memory", verdict=REFUSED, quick=True,
        source="""
            buffer = ctypes.create_string_buffer(64)
            vector = struct.pack('QQ', ctypes.addressof(buffer), 64)
            probe('own', lambda: raw('process_vm_readv', os.getpid(), vector, 1, vector, 1, 0))
            probe('write', lambda: raw('process_vm_writev', os.getpid(), vector, 1, vector, 1, 0))
            for pid in (VICTIM_PID, SERVICE_PID, 2):
                probe('other', lambda: raw('process_vm_readv', pid, vector, 1, vector, 1, 0))
            probe('mem', lambda: os.open('/proc/%d/mem' % SERVICE_PID, os.O_RDONLY))
            probe('kcmp', lambda: raw('kcmp', os.getpid(), os.getpid(), 0, 0, 0))
            """,
        held=["own {no}", "write {no}", *["other ({no}|ESRCH)"] * 3, "mem {absent}", "kcmp {no}"],
        free=["own got 64", "write got 64", *["other .*"] * 3, "mem got .*", "kcmp (got 0|ENOSYS)"],
    ),
    Attack(
        name="steal descriptors of another process", verdict=REFUSED,
        source="""
            probe('open', lambda: raw('pidfd_open', SERVICE_PID, 0))
            probe('get', lambda: raw('pidfd_getfd', raw('pidfd_open', os.getpid(), 0), 0, 0))
            """,
        held=["open ({no}|ESRCH)", "get {no}"],
    ),
    Attack(
        name="System V shared memory of the host", verdict=REFUSED, quick=True,
        source="_libc.shmat.restype = ctypes.c_long\n"
        "probe('attach', lambda: libc('shmat', ctypes.c_int(SEGMENT), None, 0) and 'attached')\n"
        "probe('make', lambda: libc('shmctl', raw('shmget', 0, 4096, 0o1666), 0, None))",
        held=["attach (EINVAL|EIDRM|{no})", "make {no}"], free=["attach got 'attached'", "make got .*"],
    ),
    Attack(
        name="System V semaphores and queues", verdict=REFUSED,
        source="probe('semaphores', lambda: libc('semctl', raw('semget', 0, 4, 0o1666), 0, 0))\n"
        "probe('queue', lambda: libc('msgctl', raw('msgget', 0, 0o1666), 0, None))",
        held=["semaphores {no}", "queue {no}"], free=["semaphores got .*", "queue got .*"],
    ),
    Attack(
        name="POSIX message queues and shared names", verdict=REFUSED,
        source="""
            probe('segment', lambda: libc('shm_open', b'/' + os.path.basename(SHARED).encode(), os.O_RDWR, 0))
            probe('queue', lambda: raw('mq_open', b'rollmesh' + TOKEN.encode(), 0o102, 0o666, 0))
            probe('unlink', lambda: raw('mq_unlink', b'rollmesh' + TOKEN.encode()))
            """,
        held=["segment (ENOENT|{no})", "queue (EMFILE|ENOSPC|ENOENT|{no})", "unlink (ENOENT|{no})"],
        free=["segment got .*", "queue .*", "unlink .*"],
    ),
    Attack(
        name="keyrings", verdict=REFUSED, quick=True,
        source="probe('add', lambda: raw('add_key', b'user', b'stray', b'x', 1, -3))\n"
        "probe('request', lambda: raw('request_key', b'user', b'stray', 0, 0))\n"
        "probe('session', lambda: raw('keyctl', 0, -3, 1))",
        held=["add {no}", "request {no}", "session {no}"], free=["add (got .*|ENOSYS)", "request .*", "session .*"],
    ),
    Attack(
        name="descriptors inherited", verdict=HARMLESS, quick=True,
        source="""
            found = []
            for fd in range(4096):
                try:
                    os.fstat(fd)
                    found.append(fd)
                except OSError:
                    pass
            print(found)
            """,
        held=[r"\[0, 1, 2, 3\]"],
    ),
    Attack(
        name="secrets in the environment, arguments and memory of the zygote", verdict=HARMLESS,
        source="""
            import gc
            words = ('TOKEN', 'SECRET', 'KEY', 'PASSWORD', 'AWS', 'HF_', 'ROLLMESH')
            print('environment', [name for name in os.environ if any(word in name for word in words)])
            print('arguments', sys.argv, [name for name in sys.modules if name.split('.')[0] in ('grpc', 'msgspec', 'asyncio')])
            hits = [o for o in gc.get_objects() if type(o) is dict and any('oracle' in str(k) for k in list(o)[:50] if type(k) is str)]
            print('answers', len([o for o in hits if o.get('oracle')]))
            """,
        held=[r"environment \[\]", r"arguments \['-c'\] \[\]", "answers 0"],
    ),
    Attack(
        name="send descriptors and ancillary data to the service", verdict=HARMLESS,
        source="""
            service = socket.socket(fileno=os.dup(3))
            fds = [os.open('/dev/zero', os.O_RDONLY) for _ in range(20)]
            probe('send', lambda: socket.send_fds(service, [b''], fds))
            """,
        held=["send .*"],
    ),
    Attack(
        name="the cgroup: leave it, raise it, freeze it", verdict=REFUSED,
        source="for path in ('/sys/fs/cgroup', '/sys/fs/cgroup/cgroup.procs', '/sys/fs/cgroup/memory/memory.limit_in_bytes',"
        " '/proc/self/cgroup'):\n    probe('open', lambda: os.open(path, os.O_RDONLY))",
        held=["open {absent}"] * 4,
    ),
)  # fmt: skip

FAMILY = Family(name="other sessions", attacks=ATTACKS)

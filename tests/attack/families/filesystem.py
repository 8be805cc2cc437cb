"""Attacks on files of the host: read, write, reach them by another path, or leave files behind."""

from __future__ import annotations

from ..attack import Attack, Family, Verdict

REFUSED, HARMLESS = Verdict.REFUSED, Verdict.HARMLESS

ATTACKS = (
    Attack(
        name="read a host file by its path", verdict=REFUSED, quick=True,
        source="probe('read', lambda: read(CANARY))",
        held=["read {absent}"], free=["read got b'secret-.*"],
    ),
    Attack(
        name="write a host file by its path", verdict=REFUSED, quick=True,
        source="probe('append', lambda: os.open(CANARY, os.O_WRONLY | os.O_APPEND))",
        held=["append {absent}"], free=["append got .*"],
    ),
    Attack(
        name="read password hashes, homes and keys", verdict=REFUSED,
        source="for path in ('/etc/shadow', '/root/.ssh', '/home', '/var', '/run', '/etc/ssl', '/boot'):\n"
        "    probe(path, lambda: os.stat(path).st_ino)",
        held=["/[a-z/.]+ {absent}"] * 7, free=["/[a-z/.]+ (got .*|ENOENT)"] * 7,
    ),
    Attack(
        name="read the repository", verdict=REFUSED,
        source="probe('list', lambda: len(os.listdir(REPOSITORY)))\n"
        "probe('code', lambda: read(REPOSITORY + '/pyproject.toml'))",
        held=["list {absent}", "code {absent}"], free=["list got .*", "code got .*"],
    ),
    Attack(
        name="write beside the standard library", verdict=REFUSED, quick=True,
        source="for folder in (os.path.dirname(os.__file__), sys.base_prefix, '/usr/lib', '/usr/bin', '/etc', '/', '/dev'):\n"
        "    probe(folder, lambda: write(folder + '/stray-' + TOKEN) and os.unlink(folder + '/stray-' + TOKEN))",
        held=[".* {readonly}"] * 7, free=[".* got None"] * 7,
    ),
    Attack(
        name="rewrite a library file in place", verdict=REFUSED,
        source="probe('open', lambda: os.open(os.__file__, os.O_RDWR))\n"
        "probe('truncate', lambda: os.truncate('/etc/passwd', 0))\n"
        "probe('chmod', lambda: os.chmod(os.__file__, 0o666))\n"
        "probe('utime', lambda: os.utime(os.__file__, (0, 0)))\n"
        "probe('xattr', lambda: os.setxattr(os.__file__, 'user.x', b'1'))",
        held=["open {readonly}", "truncate {readonly}", "chmod {readonly}", "utime {readonly}", "xattr ({readonly}|ENOTSUP|ENOSYS)"],
    ),
    Attack(
        name="remove or rename system directories", verdict=REFUSED,
        source="probe('rmdir', lambda: os.rmdir('/session'))\n"
        "probe('rename', lambda: os.rename('/etc', '/stray-' + TOKEN))\n"
        "probe('replace', lambda: os.rename('/etc/passwd', '/session/p'))\n"
        "probe('unlink', lambda: os.unlink('/dev/null'))",
        held=["rmdir (EBUSY|{readonly})", "rename {readonly}", "replace (EXDEV|{readonly})", "unlink (EBUSY|{readonly})"],
    ),
    Attack(
        name="remnants of the old root", verdict=REFUSED, quick=True,
        source="for path in ('/.host', '/oldroot', '/old_root', '/put_old', '/../..' + CANARY, '/session/../..' + CANARY):\n"
        "    probe('at', lambda: os.stat(path).st_ino)",
        held=["at {absent}"] * 6, free=["at (ENOENT|got .*)"] * 6,
    ),
    Attack(
        name="leave the root through an open directory", verdict=REFUSED,
        source="""
            fd = os.open('/', os.O_RDONLY)
            for _ in range(40):
                fd = os.open('..', os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
            probe('above', lambda: os.open(CANARY.lstrip('/'), os.O_RDONLY, dir_fd=fd))
            """,
        held=["above {absent}"], free=["above got .*"],
    ),
    Attack(
        name="the classic chroot escape", verdict=REFUSED, quick=True,
        source="""
            os.mkdir('cell')
            outside = os.open('.', os.O_RDONLY)
            probe('chroot', lambda: os.chroot('cell'))
            os.fchdir(outside)
            probe('again', lambda: raw('chroot', b'cell'))
            """,
        held=["chroot {no}", "again {no}"], free=["chroot got None", "again got 0"],
    ),
    Attack(
        name="symbolic links to the host", verdict=REFUSED,
        source="""
            os.symlink(CANARY, 'link')
            probe('through', lambda: read('link'))
            os.symlink('/', 'root')
            probe('root', lambda: read('root' + CANARY))
            probe('write', lambda: write('link'))
            """,
        held=["through {absent}", "root {absent}", "write {absent}"], free=["through got .*", "root got .*", "write got .*"],
    ),
    Attack(
        name="hard links across the border", verdict=REFUSED,
        source="probe('link', lambda: os.link(CANARY, 'hard'))\n"
        "probe('library', lambda: os.link(os.__file__, 'hard'))\n"
        "probe('null', lambda: os.link('/dev/null', 'hard'))",
        held=["link {absent}", "library (EXDEV|{readonly})", "null (EXDEV|{readonly})"],
    ),
    Attack(
        name="rename out of the session", verdict=REFUSED,
        source="write('mine')\n"
        "for target in ('/stray-', '/usr/stray-', '/etc/stray-', '/dev/stray-', FOLDER + '/stray-'):\n"
        "    probe('to', lambda: os.rename('mine', target + TOKEN))",
        held=["to (EXDEV|{readonly}|ENOENT)"] * 5,
    ),
    Attack(
        name="nameless files outside the session", verdict=REFUSED,
        source="for folder in ('/', '/etc', '/usr', '/dev', '/dev/shm/..'):\n"
        "    probe('tmpfile', lambda: os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600))",
        held=["tmpfile {readonly}"] * 5, free=["tmpfile (got .*|EOPNOTSUPP)"] * 5,
    ),
    Attack(
        name="the host's shared memory directory", verdict=REFUSED, quick=True,
        source="probe('read', lambda: read(SHARED))\nprobe('write', lambda: os.open(SHARED, os.O_RDWR))\n"
        "probe('elsewhere', lambda: os.stat('/dev/shm').st_ino == os.stat('/session').st_ino)",
        held=["read {absent}", "write {absent}", "elsewhere got True"],
        free=["read got .*", "write got .*", "elsewhere ENOENT"],
    ),
    Attack(
        name="memory as an executable file", verdict=REFUSED,
        source="probe('memfd', lambda: raw('memfd_create', b'x', 0))\n"
        "probe('secret', lambda: raw('memfd_secret', 0))",
        held=["memfd {no}", "secret {no}"], free=["memfd got .*", "secret .*"],
    ),
    Attack(
        name="make device nodes", verdict=REFUSED, quick=True,
        source="import stat\n"
        "for kind, major, minor in ((stat.S_IFCHR, 1, 1), (stat.S_IFBLK, 254, 0), (stat.S_IFCHR, 1, 11)):\n"
        "    probe('node', lambda: os.mknod('node%d%d' % (major, minor), kind | 0o666, os.makedev(major, minor)))",
        held=["node {no}"] * 3, free=["node got None"] * 3,
    ),
    Attack(
        name="open memory, disks, kernel log, consoles and tuns", verdict=REFUSED,
        source="for name in ('mem', 'kmem', 'kmsg', 'port', 'vda', 'sda', 'tty', 'console', 'net/tun', 'fuse', 'kvm',"
        " 'vsock', 'nvidiactl'):\n    probe('open', lambda: os.open('/dev/' + name, os.O_RDONLY | os.O_NONBLOCK))",
        held=["open (ENOENT|ENXIO|ENOTDIR)"] * 13, free=["open .*"] * 13,
    ),
    Attack(
        name="set-user-id files of the session", verdict=HARMLESS,
        source="""
            import shutil
            shutil.copy(os.path.realpath('/usr/bin/id') if os.path.exists('/usr/bin/id') else '/bin/true', 'mine')
            os.chmod('mine', 0o6755)
            print('status', run_program('./mine')[0])
            probe('root', lambda: os.setuid(0))
            """,
        held=["status (0|1|126)", "root {no}|root EINVAL"], free=["status 0", "root got None"],
    ),
    Attack(
        name="set-user-id programs of the system", verdict=REFUSED, quick=True,
        source="""
            programs = [p for p in ('/usr/bin/su', '/bin/su', '/usr/bin/mount', '/usr/bin/newgrp', '/usr/bin/passwd',
                                    '/usr/bin/chsh') if os.path.exists(p)]
            print('found', bool(programs))
            child = "import os,sys; print(os.geteuid() == 0)"
            probe('su', lambda: run_program('/bin/sh', '-c', 'su root -c id; mount -t tmpfs none /etc; id -u')[1].strip() == '0')
            """,
        held=["found (True|False)", "su got False"], free=["found .*", "su got (True|False)"],
    ),
    Attack(
        name="file handles instead of paths", verdict=REFUSED,
        source="handle = struct.pack('<Ii', 128, 0) + bytes(128)\n"
        "probe('make', lambda: raw('name_to_handle_at', -100, b'/', handle, ctypes.byref(ctypes.c_int()), 0))\n"
        "probe('open', lambda: raw('open_by_handle_at', -100, handle, 0))",
        held=["make {no}", "open {no}"], free=["make .*", "open (got .*|ESTALE|EINVAL|EBADF)"],
    ),
    Attack(
        name="give files away, or locks and leases on what is shared", verdict=REFUSED,
        source="""
            import fcntl
            write('mine')
            probe('chown', lambda: os.chown('mine', 0, 0))
            shared = os.open(os.__file__, os.O_RDONLY)
            probe('lease', lambda: fcntl.fcntl(shared, fcntl.F_SETLEASE, fcntl.F_RDLCK))
            probe('immutable', lambda: fcntl.ioctl(shared, 0x40086602, struct.pack('l', 0x10)))
            """,
        held=["chown (EPERM|EINVAL)", "lease {no}", "immutable ({readonly}|ENOTTY|ENOSYS)"],
        free=["chown got None", "lease got 0", "immutable .*"],
    ),
)  # fmt: skip

FAMILY = Family(name="filesystem", attacks=ATTACKS)

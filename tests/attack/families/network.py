"""Attacks on networks: the internet, the host's loopback, the mesh's ports, and sockets without a network."""

from __future__ import annotations

from ..attack import Attack, Family, Verdict

REFUSED = Verdict.REFUSED


def _socket(name: str, family: str, kind: str, use: str, free: str) -> Attack:
    """Create a socket and use it immediately, so that the use succeeds without isolation."""
    return Attack(
        name=name, verdict=REFUSED, quick=family in ("AF_INET", "AF_NETLINK"),
        source=f"def reach():\n    s = socket.socket({family}, {kind})\n    s.settimeout(1)\n    return {use}\nprobe('reach', reach)",
        held=["reach {cut off}"], free=[f"reach {free}"],
    )  # fmt: skip


ATTACKS = (
    _socket("TCP to a port on loopback", "socket.AF_INET", "1", "s.connect(('127.0.0.1', TCP_PORT))", "got None"),
    _socket("UDP to a port on loopback", "socket.AF_INET", "2", "s.sendto(b'x', ('127.0.0.1', UDP_PORT))", "got 1"),
    _socket("TCP over IPv6", "socket.AF_INET6", "1", "s.bind(('::1', 0))", "(got None|EADDRNOTAVAIL)"),
    _socket("listen for others", "socket.AF_INET", "1", "(s.bind(('0.0.0.0', 0)), s.listen())", "got .*"),
    _socket("ping and raw packets", "socket.AF_INET", "socket.SOCK_RAW, 1", "s.sendto(bytes(8), ('127.0.0.1', 0))", "got 8"),
    _socket("packets on the wire", "socket.AF_PACKET", "socket.SOCK_RAW", "s.fileno()", "got .*"),
    _socket("routes and interfaces by netlink", "socket.AF_NETLINK", "3, 0", "s.bind((0, 0))", "got None"),
    _socket("audit and firewall by netlink", "socket.AF_NETLINK", "3, 9", "s.bind((0, 0))", "(got None|EPROTONOSUPPORT)"),
    _socket("the hypervisor by vsock", "40", "1", "s.fileno()", "(got .*|EAFNOSUPPORT)"),
    _socket("kernel crypto", "38", "5", "s.fileno()", "(got .*|EAFNOSUPPORT)"),
    _socket("bluetooth, CAN, TIPC and others", "29", "3, 1", "s.fileno()", "(got .*|EAFNOSUPPORT|EPROTONOSUPPORT)"),
    _socket("a Unix socket at a path", "socket.AF_UNIX", "1", "s.connect(UNIX_PATH)", "got None"),
    _socket("an abstract Unix socket", "socket.AF_UNIX", "1", "s.connect(ABSTRACT_STREAM)", "got None"),
    Attack(
        name="abstract addresses from a datagram socketpair", verdict=REFUSED, quick=True,
        source="def send():\n    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "    return a.sendto(b'out', ABSTRACT_DATAGRAM)\nprobe('send', send)",
        held=["send {cut off}"], free=["send got 3"],
    ),
    Attack(
        name="the session's own socket sends to an abstract address", verdict=REFUSED, quick=True,
        source="mine = socket.socket(fileno=os.dup(3))\n"
        "probe('send', lambda: mine.sendto(b'out', ABSTRACT_DATAGRAM))\n"
        "probe('pair', lambda: socket.socketpair()[0].sendto(b'out', ABSTRACT_DATAGRAM))",
        held=["send (EISCONN|{cut off})", "pair (EISCONN|{cut off})"],
    ),
    Attack(
        name="the session's own socket turned elsewhere", verdict=REFUSED,
        source="""
            mine = socket.socket(fileno=os.dup(3))
            probe('reconnect', lambda: mine.connect(ABSTRACT_STREAM))
            probe('bind', lambda: mine.bind('\\0stolen-' + TOKEN))
            probe('listen', lambda: mine.listen())
            """,
        held=["reconnect (EISCONN|{cut off})", "bind (got None|EINVAL|{no})", "listen (EINVAL|{no})"],
    ),
    Attack(
        name="names resolved", verdict=REFUSED,
        source="def resolve():\n    socket.getaddrinfo('localhost.example', 80)\nprobe('resolve', resolve)\n"
        "import urllib.request\nprobe('fetch', lambda: urllib.request.urlopen('http://127.0.0.1:%d' % TCP_PORT, timeout=0.2))",
        held=["resolve .*(EAI|resolution|known|-).*|resolve {no}", "fetch .*(denied|not permitted|refused|unreachable).*"],
        free=["resolve .*", "fetch .*timed out.*|fetch TimeoutError"],
    ),
    Attack(
        name="every well-known port of a mesh", verdict=REFUSED,
        source="""
            reached = []
            for port in (22, 53, 80, 443, 2375, 4222, 6222, 8222, 6379, 9090, 50051, TCP_PORT):
                try:
                    socket.create_connection(('127.0.0.1', port), 0.2)
                    reached.append(port)
                except OSError:
                    pass
            print('own port reached', TCP_PORT in reached)
            print('others', len(reached) - (TCP_PORT in reached))
            """,
        held=["own port reached False", "others 0"], free=["own port reached True", "others .*"],
    ),
    Attack(
        name="programs that speak for it", verdict=REFUSED,
        source="""
            print('bash', run_program('/bin/bash', '-c', 'exec 9<>/dev/tcp/127.0.0.1/%d && echo in' % TCP_PORT)[1].strip())
            """,
        held=["bash "], free=["bash in"],
    ),
    Attack(
        name="network namespaces and interfaces", verdict=REFUSED,
        source="""
            import fcntl
            probe('host namespace', lambda: os.open('/proc/%d/ns/net' % SERVICE_PID, os.O_RDONLY))
            a, b = socket.socketpair()
            probe('flags', lambda: fcntl.ioctl(a, 0x8914, struct.pack('16sH22x', b'lo', 0x41)))
            probe('interfaces', lambda: [name for _, name in socket.if_nameindex()])
            """,
        held=["host namespace {absent}", "flags (ENOTTY|EINVAL|ENODEV|{no})", "interfaces (got .*lo.*|{no})"],
        free=["host namespace got .*", "flags .*", "interfaces got .*"],
    ),
)  # fmt: skip

FAMILY = Family(name="network", attacks=ATTACKS)

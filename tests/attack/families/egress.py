"""A session with a policy tries to reach more than the policy allows, or to harm other sessions, through its egress
port."""

from __future__ import annotations

import ast
import json
import logging
from collections.abc import Mapping

from ..arena import Scene
from ..attack import Attack, Family, Verdict
from ..online import HOST, INNER, ONLINE

REFUSED, HARMLESS = Verdict.REFUSED, Verdict.HARMLESS
_LOG = logging.getLogger("rollmesh.services.sandbox.egress.proxy")
_PAGE = "page got 200 hello"
_ASK_PAGE = f"ask_patiently('page', 'http://{HOST}:%d/open/page' % ALLOWED_PORT)"
"""Last line of attacks that might have broken the egress port."""


def _asks(name: str, urls: Mapping[str, tuple[str, str]], *, quick: bool = False) -> Attack:
    """One GET each: label -> URL, result. {port} is the allowed port, {bad} the forbidden one; backslashes are
    Python's."""
    lines = [f"URLS = { ({label: url for label, (url, _) in urls.items()})!r}", "for label, url in URLS.items():"]
    lines.append("    url = url.replace('{port}', str(ALLOWED_PORT)).replace('{bad}', str(FORBIDDEN_PORT))")
    lines.append("    ask(label, url.replace('{tcp}', str(TCP_PORT)))")
    held = [f"{label} {rule}" for label, (_, rule) in urls.items()]
    return Attack(name=name, verdict=REFUSED, source="\n".join(lines), held=held, profile=ONLINE, quick=quick)


def _by(rule: str) -> str:
    return f"refused by {rule}"


_LIST = _asks("URLs that the policy does not allow", {
    "host": ("http://other.test:{bad}/", _by("host")),
    "below": (f"http://sub.{HOST}:{{port}}/open/page", _by("host")),
    "ending": (f"http://evil{HOST}:{{port}}/open/page", _by("host")),
    "localhost": ("http://localhost:{bad}/", _by("host")),
    "tls": (f"https://{HOST}:{{port}}/open/page", _by("scheme")),
    "file": (f"file://{HOST}/etc/passwd", _by("scheme")),
    "gopher": ("gopher://localhost:{bad}/_x", _by("scheme")),
    "unix": ("unix:///run/docker.sock", _by("scheme")),
    "path": (f"http://{HOST}:{{port}}/private", _by("path")),
    "beside": (f"http://{HOST}:{{port}}/openly", _by("path")),
    "dots": (f"http://{HOST}:{{port}}/open/../private", _by("path")),
    "coded": (f"http://{HOST}:{{port}}/open/%2e%2e/private", _by("path")),
    "twice": (f"http://{HOST}:{{port}}/open/%252e%252e/private", _by("path")),
    "slash": (f"http://{HOST}:{{port}}/open/x%2f..%2f..%2fprivate", _by("path")),
    "own": ("/private", _by("not_found")),
    "double": ("//127.0.0.1:{bad}/", _by("not_found")),
}, quick=True)  # fmt: skip

_ADDRESSES = _asks("addresses instead of names", {
    "plain": ("http://127.0.0.1:{bad}/", _by("ip_literal")),
    "short": ("http://127.1:{bad}/", _by("ip_literal")),
    "decimal": ("http://2130706433:{bad}/", _by("ip_literal")),
    "hex": ("http://0x7f000001:{bad}/", _by("ip_literal")),
    "mixed": ("http://0x7f.0.0.0x1:{bad}/", _by("ip_literal")),
    "octal": ("http://0177.0.0.01:{bad}/", _by("ip_literal")),
    "nought": ("http://0:{bad}/", _by("ip_literal")),
    "rooted": ("http://127.0.0.1.:{bad}/", _by("ip_literal")),
    "six": ("http://[::1]:{bad}/", _by("ip_literal")),
    "mapped": ("http://[::ffff:127.0.0.1]:{bad}/", _by("ip_literal")),
    "scoped": ("http://[fe80::1%25lo]:{bad}/", _by("ip_literal")),
    "metadata": ("http://169.254.169.254/latest/meta-data/", _by("ip_literal")),
}, quick=True)  # fmt: skip

_PARSERS = _asks("URLs that two parsers read differently", {
    "user": (f"http://{HOST}@127.0.0.1:{{bad}}/open/", _by("malformed")),
    "password": (f"http://{HOST}:{{port}}@127.0.0.1:{{bad}}/open/", _by("malformed")),
    "backslash": (f"http://127.0.0.1:{{bad}}\\@{HOST}:{{port}}/open/", _by("malformed")),
    "fragment": (f"http://127.0.0.1:{{bad}}#@{HOST}:{{port}}/open/", _by("malformed")),
    "wide digits": ("http://１２７.0.0.1:{bad}/", _by("malformed")),
    "wide dot": ("http://127。0。0。1:{bad}/", _by("malformed")),
    "coded host": (f"http://127.0.0.1%2f.{HOST}:{{port}}/open/", _by("malformed")),
    "tab": (f"http://{HOST}\t.evil.test:{{bad}}/open/", _by("malformed")),
    "two ports": (f"http://{HOST}:{{port}}:{{bad}}/open/page", _by("malformed")),
    "no port": (f"http://{HOST}:/open/page", _by("malformed")),
    "big port": (f"http://{HOST}:99999/open/page", _by("port")),
    "one slash": (f"http:/{HOST}:{{port}}/open/page", _by("malformed")),
    "root dot": (f"http://{HOST}.:{{port}}/open/page", "got 200 hello"),
})  # fmt: skip

_INSIDE = _asks("names on the list that lead inside", {
    name: (f"http://{name}.public.test:{{bad}}/", _by("address"))
    for name in ("loopback", "six", "mapped", "nat64", "sixtofour", "unspecified", "mixed", "metadata")
} | {"no name": (f"http://{'a' * 64}.public.test:{{bad}}/", _by("upstream"))}, quick=True)  # fmt: skip

_PORTS = _asks("the mesh's own ports through the proxy", {
    **{f"port {port}": (f"http://{HOST}:{port}/open/", _by("port")) for port in (22, 2375, 4222, 8222, 9090, 50051)},
    "ours": (f"http://{HOST}:{{tcp}}/open/", _by("port")),
    "below": ("http://loopback.public.test:{tcp}/", _by("port")),
    "search": ("/browse?url=http%3A%2F%2Flocalhost%3A{tcp}%2F", _by("host")),
})  # fmt: skip

_REDIRECTS = _asks("redirects to what is not allowed", {
    "answer": (f"http://{HOST}:{{port}}/open/away", "got 302 "),
    "by hand": ("http://127.0.0.1:{bad}/", _by("ip_literal")),
    "host": (f"/browse?url=http%3A%2F%2F{HOST}%3A{{port}}%2Fopen%2Faway", _by("ip_literal")),
    "path": (f"/browse?url=http%3A%2F%2F{HOST}%3A{{port}}%2Fopen%2Fdown", _by("path")),
    "file": ("/browse?url=file%3A%2F%2F%2Fetc%2Fpasswd", _by("scheme")),
    "document": ("/retrieve?id=http%3A%2F%2F127.0.0.1%3A{bad}%2F", _by("ip_literal")),
    "page": (f"http://{HOST}:{{port}}/open/page", "got 200 hello"),
})  # fmt: skip

_SMUGGLED = Attack(
    name="lines, headers and requests smuggled into one", verdict=REFUSED, profile=ONLINE, quick=True,
    source=f"""
        PAGE = 'http://{HOST}:%d/open/page' % ALLOWED_PORT
        hidden = b'GET /private HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n'
        ask('line in URL', PAGE + ' HTTP/1.1\\r\\nX-Smuggled: 1\\r\\nX:')
        ask('newline in URL', PAGE + '\\nX-Smuggled:1')
        ask('coded line', PAGE + '?%0d%0aX-Smuggled:%201')
        ask('bare return', PAGE, headers=b'Accept: a\\rX-Smuggled: 1\\r\\n')
        ask('nought', PAGE, headers=b'Accept: a\\0b\\r\\n')
        ask('foreign letters', PAGE, headers=b'Accept: \\xff\\xfe\\r\\n')
        ask('credentials', PAGE + '?1', headers=b'Cookie: a\\r\\nAuthorization: b\\r\\nX-Smuggled: 1\\r\\nUpgrade: h2c\\r\\n')
        ask('second request', PAGE, headers=b'\\r\\n' + hidden)
        ask('two lengths', PAGE, 'POST', b'Content-Length: 3\\r\\n', hidden)
        ask('both framings', PAGE, 'POST', b'Transfer-Encoding: chunked\\r\\n', b'0\\r\\n\\r\\n' + hidden)
        ask('in the body', PAGE, 'POST', body=hidden)
        ask('two hosts', PAGE, headers=b'Host: other.test\\r\\n')
        ask('tunnel', 'localhost:%d' % FORBIDDEN_PORT, 'CONNECT')
        ask('delete', PAGE, 'DELETE')
        ask('answer with foreign letters', PAGE.replace('page', 'foreign'))
        ask('answer with two lines in one', PAGE.replace('page', 'split'))
        """,
    held=[
        "line in URL got 200 hello", "newline in URL refused by malformed", "coded line got 200 hello",
        "bare return refused by malformed", "nought refused by malformed", "foreign letters got 200 hello",
        "credentials got 200 hello", "second request refused by malformed", "two lengths refused by malformed",
        "both framings refused by malformed", "in the body got 200 hello", "two hosts refused by malformed",
        "tunnel refused by connect", "delete refused by method", "answer with foreign letters got 200 hello",
        "answer with two lines in one refused by upstream",
    ],
)  # fmt: skip

_LARGE = Attack(
    name="requests and answers too large or without end", verdict=REFUSED, profile=ONLINE,
    source=f"""
        HERE = 'http://{HOST}:%d/open/' % ALLOWED_PORT
        ask('long URL', HERE + 'x' * 100_000)
        ask('long header', HERE + 'page', headers=b'Accept: ' + b'x' * 100_000 + b'\\r\\n')
        ask('headers', HERE + 'page', headers=b'A: b\\r\\n' * 20_000)
        ask('body', HERE + 'page', 'POST', body=bytes(1 << 20))
        ask('declared length', HERE + 'page', 'POST', b'Content-Length: 99999999999\\r\\n')
        ask('length of many digits', HERE + 'page', 'POST', b'Content-Length: ' + b'9' * 5000 + b'\\r\\n')
        ask('negative length', HERE + 'page', 'POST', b'Content-Length: -1\\r\\n')
        ask('chunks', HERE + 'page', 'POST', b'Transfer-Encoding: chunked\\r\\n\\r\\n' + b'800\\r\\n' + b'x' * 0x800 + b'\\r\\n'
            + b'fff\\r\\n' + b'x' * 0xfff + b'\\r\\n0\\r\\n')
        ask('chunk of all', HERE + 'page', 'POST', b'Transfer-Encoding: chunked\\r\\n\\r\\n' + b'f' * 16 + b'\\r\\nx')
        ask('question', '/search?q=' + 'x' * 5000)
        for name in ('large', 'bomb', 'endless', 'hang'):
            ask(name, HERE + name)
        {_ASK_PAGE}
        """,
    held=[
        "long URL refused by header_bytes", "long header refused by header_bytes", "headers refused by header_bytes",
        "body refused by request_bytes", "declared length refused by request_bytes", "length of many digits refused by malformed",
        "negative length refused by malformed", "chunks refused by request_bytes", "chunk of all refused by .*",
        "question refused by request_bytes", "large refused by response_bytes", "bomb refused by response_bytes",
        "endless refused by response_bytes", "hang refused by timeout", _PAGE,
    ],
)  # fmt: skip

_PAGE_ELSEWHERE = f"outcome_of(request('http://{HOST}:%d/open/page' % ALLOWED_PORT))"


async def _flood(scene: Scene) -> None:
    """The attacker uses up its tenant's rate and its session's requests; another tenant must still be served."""
    result = await scene.run(
        f"""
        url = 'http://{HOST}:%d/open/page?%%d' % ALLOWED_PORT
        said = [outcome_of(request(url % number, headers=b'X-Tenant: another\\r\\n')) for number in range(200)]
        print('answered', sum(line.startswith('got 200') for line in said) <= 60)
        print('rate', 'refused by rate' in said)
        print('requests', 'refused by requests' in said)
        print('then', said[-1])
        """
    )
    scene.lines += result.stdout.splitlines()
    scene.say(await scene.elsewhere(_PAGE_ELSEWHERE, ONLINE, 10.0))


_FLOOD = Attack(
    name="a flood of requests", verdict=REFUSED, profile=ONLINE, source="", drive=_flood,
    held=["answered True", "rate True", "requests True", "then EgressError", "'got 200 hello'"],
)  # fmt: skip

_UNREAD = Attack(
    name="connections held, answers never taken", verdict=REFUSED, profile=ONLINE,
    source=f"""
        held = [egress.connect() for _ in range(3)]
        for link in held:
            link.sendall(request('http://{HOST}:%d/open/page' % ALLOWED_PORT)[:-2])
        print('fourth', outcome_of(b''))
        cut = select.poll()
        for link in held:
            cut.register(link, select.POLLIN | select.POLLHUP)
        ended = time.monotonic() + 9
        while len(cut.poll(1000)) < 3 and time.monotonic() < ended:
            pass
        print('cut', len(cut.poll(0)))
        {_ASK_PAGE}
        """,
    held=["fourth refused by requests", "cut 3", "page (got 200 hello|refused by requests)"], wall_s=15.0,
)  # fmt: skip

# The kernel sends a connected SOCK_SEQPACKET's packets to its peer, whatever address is given with them: "elsewhere" is
# a packet, too.
_PACKETS = Attack(
    name="invalid packets at the port", verdict=REFUSED, profile=ONLINE,
    source=f"""
        with egress.connect() as link:
            probe('link turned', lambda: link.connect(ABSTRACT_STREAM))
        port = socket.socket(fileno=os.dup(4))
        for label, packet in (('long', b'+' * 65536), ('other', b'{{"session": "neighbor", "tenant": "another"}}')):
            port.send(packet)
            select.select([port], [], [], 5)
            got, fds, _, _ = socket.recv_fds(port, 4096, 8)
            print(label, got, len(fds))
            [os.close(fd) for fd in fds]
        probe('elsewhere', lambda: port.sendto(b'c', ABSTRACT_DATAGRAM))
        probe('turned', lambda: port.connect(ABSTRACT_STREAM))
        {_ASK_PAGE}
        port.setblocking(False)
        sent = 0
        try:
            while sent < 100_000:
                sent += bool(port.send(b'c'))
        except OSError:
            pass
        fds = []
        try:
            said = b'+'
            while said and len(fds) < 200:
                select.select([port], [], [], 1)
                said, given, _, _ = socket.recv_fds(port, 4096, 8)
                fds += given
        except OSError:
            pass
        print('granted unasked', len(fds) > 60)
        port.setblocking(True)
        probe('empty', lambda: port.send(b''))
        """,
    held=[
        "link turned (EISCONN|{cut off})", r"long b'\+' 1", r"other b'\+' 1", "elsewhere (got 1|EISCONN|EOPNOTSUPP|{cut off})",
        "turned (EISCONN|EINVAL|{cut off})", _PAGE, "granted unasked False",
        "empty (got 0|EPIPE|ECONNRESET)",
    ],
)  # fmt: skip

_DESCRIPTORS = Attack(
    name="descriptors sent to the proxy", verdict=REFUSED, profile=ONLINE,
    source=f"""
        def send(link, data, count):
            given = [4, *os.pipe(), os.open('/session', os.O_RDONLY)]
            socket.send_fds(link, [data], (given * count)[:250])
            [os.close(fd) for fd in given[1:]]
        port = socket.socket(fileno=os.dup(4))
        for _ in range(5):
            send(port, b'c', 60)
            granted = socket.recv_fds(port, 4096, 8)[1]
            print('granted', len(granted))
            link = socket.socket(fileno=granted[0])
            send(link, request('http://{HOST}:%d/open/page' % ALLOWED_PORT), 60)
            print('answered', link.recv(12))
            link.close()
        {_ASK_PAGE}
        """,
    held=["(granted 1|answered b'HTTP/1.1 200')"] * 10 + [_PAGE],
)  # fmt: skip


async def _impersonate(scene: Scene) -> None:
    """Return the session that the service's log names for requests that claim to come from another."""
    lines: list[dict[str, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(json.loads(record.getMessage().removeprefix("egress ")))  # type: ignore[method-assign]
    level = _LOG.level
    _LOG.addHandler(handler)
    _LOG.setLevel(logging.INFO)
    try:
        result = await scene.run(
            f"""
            claims = b'X-Tenant: another\\r\\nX-Session: neighbor\\r\\nX-Rollmesh-Tenant: another\\r\\nForwarded: for=another\\r\\n'
            ask('page', 'http://{HOST}:%d/open/page?tenant=another&session=neighbor' % ALLOWED_PORT, headers=claims)
            ask('path', '/search/another?q=x', headers=claims)
            ask('foreign', 'http://{HOST}:%d/open/page' % ALLOWED_PORT, headers=b'Accept: \\xff\\r\\n')
            """
        )
    finally:
        _LOG.removeHandler(handler)
        _LOG.setLevel(level)
    scene.lines += result.stdout.splitlines()
    scene.say(f"{len(lines)} requests of {sorted({(line['session'], line['tenant']) for line in lines})}")


_CLAIMS = "requests in another session's name"
_NAMES = Attack(
    name=_CLAIMS, verdict=REFUSED, profile=ONLINE, source="", drive=_impersonate,
    held=[_PAGE, "path refused by not_found", "foreign got 200 hello", rf"3 requests of \[\('attacker', \"{_CLAIMS}\"\)\]"],
)  # fmt: skip


async def _ports_of_others(scene: Scene) -> None:
    """Check that of two sessions of one zygote neither has the other's socket."""
    look = """
        import stat
        mine = {}
        for fd in range(256):
            try:
                about = os.fstat(fd)
            except OSError:
                continue
            if stat.S_ISSOCK(about.st_mode):
                mine[fd] = about.st_ino
        list(mine), sorted(mine.values())
        """
    first, later = (await scene.run(look)).result, await scene.elsewhere(look, ONLINE, 10.0)
    (fds, sockets), (later_fds, later_sockets) = (ast.literal_eval(said) for said in (first, later))
    scene.say(f"sockets {fds}, the later one's {later_fds}")
    scene.say(f"shared {sorted(set(sockets) & set(later_sockets))} of {len(sockets)}")


_OTHERS = Attack(
    name="another session's egress port", verdict=REFUSED, profile=ONLINE, source="", drive=_ports_of_others,
    held=[r"sockets \[3, 4\], the later one's \[3, 4\]", r"shared \[\] of 2"],
)  # fmt: skip


async def _records(scene: Scene) -> None:
    """Sessions of another policy that uses the same file have recorded responses that this policy forbids."""
    secret = f"outcome_of(request('http://{HOST}:%d/inner/secret' % ALLOWED_PORT))[:7]"
    for _ in range(2):
        scene.say(await scene.elsewhere(secret, INNER, 10.0))
    result = await scene.run(
        f"""
        ask('same', 'http://{HOST}:%d/inner/secret' % ALLOWED_PORT)
        ask('browsed', '/browse?url=http%3A%2F%2F{HOST}%3A{{0}}%2Finner%2Fsecret'.format(ALLOWED_PORT))
        ask('retrieved', '/retrieve?id=http%3A%2F%2F{HOST}%3A{{0}}%2Finner%2Fsecret'.format(ALLOWED_PORT))
        ask('head', 'http://{HOST}:%d/inner/secret' % ALLOWED_PORT, 'HEAD')
        """
    )
    scene.lines += result.stdout.splitlines()


_CACHE = Attack(
    name="answers kept for another policy", verdict=REFUSED, profile=ONLINE, source="", drive=_records,
    held=["'got 200'"] * 2 + [f"{label} refused by path" for label in ("same", "browsed", "retrieved", "head")],
)  # fmt: skip

ATTACKS = (
    _LIST, _ADDRESSES, _PARSERS, _INSIDE, _PORTS, _REDIRECTS, _SMUGGLED, _LARGE, _FLOOD, _UNREAD, _PACKETS, _DESCRIPTORS, _NAMES, _OTHERS,
    _CACHE,
)  # fmt: skip

FAMILY = Family(name="egress", attacks=ATTACKS)

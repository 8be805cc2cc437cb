"""Attacks by output: floods, texts that break parsers, forged and broken frames, bombs for the service."""

from __future__ import annotations

from ..attack import Attack, Family, Verdict

HARMLESS, ENDED, OUTPUT, TIME = Verdict.HARMLESS, Verdict.ENDED, Verdict.OUTPUT, Verdict.TIME

OUTPUTS = (
    Attack(
        name="print without end", verdict=OUTPUT, quick=True,
        source="while True:\n    print('x' * 1000)",
    ),
    Attack(
        name="print without end, errors swallowed", verdict=OUTPUT,
        source="while True:\n    try:\n        print('x' * 1000)\n    except Exception:\n        pass",
    ),
    Attack(
        name="write to descriptor 2 without end", verdict=HARMLESS, quick=True,
        source="signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\ndef flood():\n    while True:\n        os.write(2, bytes(65536))\n"
        "probe('flood', flood)",
        held=["flood (EFBIG|ENOSPC)"],
    ),
    Attack(
        name="a program that writes without end", verdict=HARMLESS,
        source="probe('yes', lambda: run_program('/bin/sh', '-c', 'exec yes > /session/out')[0] != 0)\n"
        "print('size', os.stat('out').st_size <= 2 << 20)\nos.unlink('out')",
        held=["yes got True", "size True"],
    ),
    Attack(
        name="a giant result", verdict=HARMLESS, quick=True, source="print('made')\n'x' * 20_000_000", held=["made"],
    ),
    Attack(
        name="results that lie about themselves", verdict=HARMLESS,
        source="class Liar:\n    def __repr__(self):\n        return b'not text'\nprint('made')\nLiar()", held=["made"],
    ),
    Attack(
        name="a result whose repr never ends", verdict=TIME, wall_s=0.4,
        source="class Slow:\n    def __repr__(self):\n        while True:\n            pass\nSlow()",
    ),
    Attack(
        name="an endless exception message", verdict=HARMLESS, source="print('made')\nraise ValueError('x' * 3_000_000)", held=["made"],
    ),
    Attack(
        name="an exception whose str never ends", verdict=TIME, wall_s=0.4, alive=False,
        source="class Slow(Exception):\n    def __str__(self):\n        while True:\n            pass\nraise Slow",
    ),
    Attack(
        name="exceptions chained ten thousand deep", verdict=HARMLESS,
        source="print('made')\nlast = None\nfor number in range(10_000):\n    error = ValueError(number)\n    error.__cause__ = last\n"
        "    last = error\nraise last",
        held=["made"],
    ),
    Attack(
        name="groups of exceptions within groups", verdict=Verdict.BOUNDED, wall_s=0.4,
        source="error = ValueError('x')\nfor _ in range(500):\n    error = ExceptionGroup('g', [error] * 2)\nraise error",
    ),
    Attack(
        name="a traceback with forged files and line numbers", verdict=HARMLESS, quick=True,
        source="print('made')\nexec(compile('\\n' * 100000 + 'raise ValueError', CANARY, 'exec'))", held=["made"],
    ),
    Attack(
        name="a type name of a megabyte", verdict=HARMLESS, source="print('made')\nraise type('E' * 10**6, (Exception,), {})", held=["made"],
    ),
    Attack(
        name="NULs, invalid UTF-8, lone surrogates, terminal codes", verdict=HARMLESS, quick=True,
        source="print('made')\nos.write(2, bytes(range(256)) * 8)\nsys.stderr.write('\\ud800\\x00\\x1b]0;owned\\x07\\u202e')\n'\\udfff\\x00'",
        held=["made"], alive=True,
    ),
    Attack(
        name="replace, close and seek the streams", verdict=HARMLESS,
        source="print('made')\nos.lseek(1, 1 << 40, 0)\nos.ftruncate(1, 1 << 20)\nsys.stdout = None\nsys.stderr = 7\nos.close(0)\nos.close(2)",
        held=["made", "\0*"],
    ),
)  # fmt: skip

_FRAME = """
    import json
    service = socket.socket(fileno=os.dup(3))
    def frame(body):
        body = body if type(body) is bytes else json.dumps(body).encode()
        return struct.pack('<I', len(body)) + body
    """


def _forged(name: str, source: str, verdict: Verdict = ENDED, *, quick: bool = False) -> Attack:
    return Attack(
        name=name,
        verdict=verdict,
        quick=quick,
        source=_FRAME + source,
        alive=False,
        wall_s=1.0 if verdict is TIME else 5.0,
    )


FRAMES = (
    _forged("bytes that are not a frame", "service.sendall(b'\\xff' * 1000)\n", quick=True),
    _forged("a length of four gigabytes", "service.sendall(struct.pack('<I', 0xFFFFFFFF) + b'{')\n", quick=True),
    _forged("a length just allowed, then silence", "service.sendall(struct.pack('<I', 300000) + b'{')\n    time.sleep(60)\n", TIME),
    _forged(
        "one byte at a time",
        "for byte in frame({'outcome': 'ok', 'stdout': 'x' * 1000}):\n"
        "        service.sendall(bytes([byte]))\n        time.sleep(0.05)\n",
        TIME,
    ),
    _forged("JSON a hundred thousand deep", "service.sendall(frame(b'[' * 100000))\n", quick=True),
    _forged("JSON objects deep in an unknown field", "service.sendall(frame(b'{\"x\":' * 50000 + b'1' + b'}' * 50000))\n"),
    _forged("a number of a hundred thousand digits", "service.sendall(frame(b'{\"wall_s\":' + b'9' * 100000 + b'}'))\n"),
    _forged("wrong types in a reply", "service.sendall(frame({'outcome': 'ok', 'stdout': [1], 'files': 7}))\n", quick=True),
    _forged("an outcome that does not exist", "service.sendall(frame({'outcome': 'accepted'}))\n    os._exit(0)\n"),
    _forged("lone surrogates in a reply", "service.sendall(frame(b'{\"outcome\":\"ok\",\"stdout\":\"\\\\ud800\"}'))\n    os._exit(0)\n"),
    _forged("invalid UTF-8 in a reply", "service.sendall(frame(b'{\"outcome\":\"ok\",\"stdout\":\"\\xff\\xfe\"}'))\n"),
    _forged("two replies at once", "service.sendall(frame({'outcome': 'ok'}) * 2)\n"),
    _forged("a pickle in place of JSON", "import pickle\n    service.sendall(frame(pickle.dumps(os.getcwd, 2)))\n", quick=True),
    _forged("a megabyte of compressed nothing", "import zlib\n    service.sendall(frame(zlib.compress(bytes(5 << 20), 1)))\n"),
    _forged("the socket shut and left open", "service.shutdown(2)\n    time.sleep(60)\n"),
    _forged("the socket closed", "service.close()\n    os.close(3)\n"),
    _forged("the socket's number taken by a file", "os.dup2(os.open('/dev/zero', os.O_RDONLY), 3)\n"),
    _forged("another program answers after exec", "os.execv('/bin/sh', ['sh', '-c', 'echo forged >&3; sleep 60'])\n"),
    _forged("a refusal of twelve megabytes", "service.sendall(frame({'refused': 'A' * 12_000_000}))\n", quick=True),
    _forged("a refusal of a megabyte", "service.sendall(frame({'refused': 'A' * (1 << 20)}))\n"),
    _forged("names of a hundred thousand files", "service.sendall(frame({'outcome': 'ok', 'files': {str(n): '' for n in range(100000)}}))\n", quick=True),
    _forged("half a million lost names", "service.sendall(frame(b'{\"lost\":[\"\"' + b',\"\"' * 500000 + b']}'))\n"),
    _forged("an exit status beyond 32 bits", "service.sendall(frame({'outcome': 'ok', 'exit_status': 10 ** 20}))\n", quick=True),
    _forged("a command of a thousand years", "service.sendall(frame({'outcome': 'ok', 'wall_s': 3e10, 'cpu_s': 3e10}))\n"),
    _forged("the reply of a call that never was", "service.sendall(frame({'ready': True, 'reason': 'x' * 1000}))\n"),
)  # fmt: skip

OUTPUT_FAMILY = Family(name="output floods", attacks=OUTPUTS)
FRAME_FAMILY = Family(name="bombs towards the service", attacks=FRAMES)

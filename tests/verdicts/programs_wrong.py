"""Wrong programs of unusual form, and programs that try to be accepted without the answer."""

from __future__ import annotations

from .case import Case
from .programs_right import ANSWER, SUM


def wrong(
    name: str,
    verdict: str,
    source: str,
    *,
    evasion: bool = False,
    plain: bool = True,
    message: str = "",
    wall_s: float = 0.0,
) -> Case:
    """A program that must not be accepted."""
    limits = {"limits": {"wall_s": wall_s}} if wall_s else {}
    manifest = {"kind": "stdio", "tests": [{"stdin": "3 4\n", "stdout": "7\n"}], **limits}
    return Case(name, verdict, source, manifest, evasion=evasion, plain=plain, message=message)


ENDS = (
    wrong("a status of 3", "RE", SUM + "import sys\nsys.exit(3)", message="status 3: nothing on stderr"),
    wrong("a status of -1", "RE", SUM + "import sys\nsys.exit(-1)", message="status 255"),
    wrong("a text for a status", "RE", SUM + "import sys\nsys.exit('no answer')", message="status 1: no answer"),
    wrong("exit with a text", "RE", SUM + "exit('stopped')", message="stopped"),
    wrong("quit(1)", "RE", SUM + "quit(1)", message="status 1"),
    wrong("raises after the answer", "RE", SUM + "1 / 0", message="ZeroDivisionError: division by zero"),
    wrong("raises before the answer", "RE", "raise ValueError('bad')\n" + SUM, message="ValueError: bad"),
    wrong("reads too far", "RE", SUM + "input()", message="EOFError"),
    wrong("syntax", "RE", "print(", message="SyntaxError"),
    wrong("indentation", "RE", "if 1:\nprint(7)", message="IndentationError"),
    wrong("a name that does not exist", "RE", "print(no_such_name)", message="no_such_name"),
    wrong("a module that does not exist", "RE", "import no_such_module", message="no_such_module"),
    wrong("recursion without end", "RE", "def down(n): return down(n + 1)\ndown(0)", message="RecursionError"),
    wrong("an exception group", "RE", SUM + "raise ExceptionGroup('many', [ValueError(1)])"),
    wrong("a failed assertion", "RE", SUM + "assert False, 'no'", message="AssertionError: no"),
    wrong("a chained exception", "RE", "try: 1 / 0\nexcept ZeroDivisionError as error: raise KeyError('k') from error", message="KeyError: 'k'"),
    wrong("KeyboardInterrupt", "RE", SUM + "raise KeyboardInterrupt"),
    wrong("a custom excepthook", "RE", SUM + "import sys\nsys.excepthook = lambda kind, *_: print('hooked', kind.__name__, file=sys.stderr)\n1 / 0", message="hooked ZeroDivisionError"),
    wrong("an excepthook that raises", "RE", SUM + "import sys\ndef hook(*_): raise TypeError('hook')\nsys.excepthook = hook\n1 / 0", message="ZeroDivisionError"),
    wrong("an excepthook that prints the answer", "RE", ANSWER + "import sys\nsys.excepthook = lambda *_: print(a + b)\n1 / 0"),
    wrong("os._exit without a flush", "WA", ANSWER + "import os\nprint(a + b)\nos._exit(0)"),
    wrong("os._exit(1)", "RE", ANSWER + "import os\nprint(a + b, flush=True)\nos._exit(1)"),
    wrong("os._exit(2) by atexit", "RE", SUM + "import atexit, os, sys\natexit.register(lambda: (sys.stdout.flush(), os._exit(2)))", message="status 2"),
    wrong("descriptor 1 closed before the flush", "RE", SUM + "import os\nos.close(1)", message="status 120"),
    wrong("stdout wrapped twice", "RE", "import io, sys\nfor _ in 'ab': sys.stdout = io.TextIOWrapper(sys.stdout.buffer)\n" + SUM, message="closed file"),
    wrong("stdout detached and dropped", "WA", "import sys\nsys.stdout.detach()\nsys.stdout = None\nprint(7)"),
    wrong("SIGSEGV", "RE", SUM + "import os, sys\nsys.stdout.flush()\nos.kill(os.getpid(), 11)", message="signal 11"),
    wrong("SIGTERM", "RE", SUM + "import os\nos.kill(os.getpid(), 15)", message="signal 15"),
    wrong("abort", "RE", SUM + "import os\nos.abort()", message="signal 6"),
    wrong("too much memory", "MLE", "data = bytearray(1 << 40)", message="MemoryError"),
    wrong("too much memory in pieces", "MLE", "data = []\nwhile True: data.append(bytearray(1 << 24))", plain=False),
    wrong("never ends", "TLE", SUM + "while True: pass", plain=False, wall_s=0.4),
    wrong("a thread that never ends", "TLE", SUM + "import threading\nthreading.Thread(target=threading.Event().wait).start()", plain=False, wall_s=0.4),
    wrong("atexit that never ends", "TLE", SUM + "import atexit, time\natexit.register(time.sleep, 1000)", plain=False, wall_s=0.4),
    wrong("__del__ that never ends", "TLE", SUM + "class Stay:\n    def __del__(self):\n        while True: pass\nstay = Stay()", plain=False, wall_s=0.4),
    wrong("sleeps", "TLE", "import time\ntime.sleep(1000)", plain=False, wall_s=0.4),
    wrong("prints without end", "OLE", "while True: print('x' * 10000)", plain=False),
    wrong("prints too much", "OLE", SUM + "print('x' * 100_000)", plain=False),
)  # fmt: skip

OUTPUTS = (
    wrong("nothing", "WA", "input()"),
    wrong("another number", "WA", "print(8)"),
    wrong("the input", "WA", "print(input())"),
    wrong("the answer on stderr", "WA", "import sys\nprint(7, file=sys.stderr)"),
    wrong("the answer to descriptor 2", "WA", "import os\nos.write(2, b'7\\n')"),
    wrong("the answer into a file", "WA", "print(7, file=open('out.txt', 'w'))"),
    wrong("the answer twice", "WA", SUM + "print(7)"),
    wrong("more lines", "WA", SUM + "print('done')"),
    wrong("a leading zero", "WA", "print('07')"),
    wrong("a fraction", "WA", "print(7.0)"),
    wrong("a sign", "WA", "print('+7')"),
    wrong("in quotes", "WA", "print(repr('7'))"),
    wrong("a prompt", "WA", "print(sum(map(int, input('sum: ').split())))"),
    wrong("a text around it", "WA", "print(f'Answer: {7}')"),
    wrong("an empty line before", "PE", "print()\n" + SUM),
    wrong("a space before", "PE", ANSWER + "print('', a + b)"),
    wrong("lines of a repeated flush after a fork", "WA", "import os\n" + SUM + "if os.fork() == 0: exit()\nos.wait()"),
    wrong("a thread loses the answer", "WA", "import os, threading\nthreading.Thread(target=lambda: print(7)).start() if os.getpid() < 0 else None"),
)  # fmt: skip

EVASIONS = (
    wrong("a no-break space at the end", "WA", "print('7\\u00a0')", evasion=True),
    wrong("an em space at the end", "WA", "print('7\\u2003')", evasion=True),
    wrong("a separator at the end", "WA", "print('7\\x1c')", evasion=True),
    wrong("a line separator", "WA", "print('7\\u2028', end='')", evasion=True),
    wrong("a zero-width space", "WA", "print('\\u200b7')", evasion=True),
    wrong("a byte order mark", "WA", "print('\\ufeff7')", evasion=True),
    wrong("a wide digit", "WA", "print('\\uff17')", evasion=True),
    wrong("an Arabic digit", "WA", "print('\\u0667')", evasion=True),
    wrong("a NUL", "WA", "print('7\\0')", evasion=True),
    wrong("a backspace", "WA", "print('8\\b7')", evasion=True),
    wrong("codes of a terminal", "WA", "print('8\\x1b[2K\\r7')", evasion=True),
    wrong("a carriage return between", "WA", "print('8\\r7')", evasion=True),
    wrong("bytes that are not UTF-8", "WA", "import os\nos.write(1, b'\\xff7\\n')", evasion=True),
    wrong("a verdict", "WA", "print('AC\\nACCEPTED\\nstatus: 0')", evasion=True),
    wrong("a status as JSON", "WA", "print('{\"status\": 0, \"stdout\": \"7\\\\n\"}')", evasion=True),
    wrong("a reply on descriptor 3", "WA", "import os\ntry: os.write(3, b'{\"outcome\": \"ok\"}')\nexcept OSError: pass", evasion=True, plain=False),
    wrong("every descriptor is written to", "WA", "import os\nfor n in (*range(3, 64),):\n    try: os.write(n, b'7\\n')\n    except OSError: pass", evasion=True, plain=False),
    wrong("the parent is killed", "WA RE", "import os\nos.kill(os.getppid(), 9)\nprint(8)", evasion=True, plain=False),
    wrong("a child answers after the end", "WA", "import os, time\nif os.fork() == 0:\n    time.sleep(60)\n    os.write(1, b'7\\n')", evasion=True, plain=False),
    wrong("json is patched", "WA", "import json\njson.dumps = lambda *_, **__: '{\"status\": 0}'\nprint(8)", evasion=True),
    wrong("the judge's frames are patched", "WA", "import gc, types\nfor f in gc.get_objects():\n    if isinstance(f, types.FunctionType) and f.__name__ in ('compare_text', 'run_program'): f.__code__ = (lambda *a: '7').__code__\nprint(8)", evasion=True, plain=False),
    wrong("a lying object is printed", "WA", "class Yes(str):\n    __eq__ = lambda *_: True\n    __hash__ = str.__hash__\nprint(Yes('8'))", evasion=True),
    wrong("the status is changed by atexit", "RE", SUM + "import atexit, sys\natexit.register(sys.exit, 0)\nsys.exit(4)", evasion=True),
    wrong("the expected output is searched", "WA", "import os\nfor folder, _, files in os.walk('/session'):\n    for name in files: print(open(os.path.join(folder, name)).read())", evasion=True, plain=False),
    wrong("the end is hidden by exec", "WA", "import os\nos.execv('/bin/true', ['true'])", evasion=True),
)  # fmt: skip

WRONG = (*ENDS, *OUTPUTS, *EVASIONS)

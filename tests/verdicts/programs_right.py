"""Correct programs of unusual form. Plain Python runs each with the same output and an exit status of 0."""

from __future__ import annotations

from .case import Case

ANSWER = "a, b = map(int, input().split())\n"
SUM = ANSWER + "print(a + b)\n"


def right(name: str, source: str, *, stdin: str = "3 4\n", stdout: str = "7\n") -> Case:
    """A program that must be accepted."""
    return Case(name, "AC", source, {"kind": "stdio", "tests": [{"stdin": stdin, "stdout": stdout}]})


ENDS = (
    right("exit() after the answer", SUM + "exit()"),
    right("quit() after the answer", SUM + "quit()"),
    right("exit(0) in a function", ANSWER + "def main():\n    print(a + b)\n    exit(0)\nmain()\nprint('never')"),
    right("exit() on a branch", ANSWER + "if a < b:\n    print(a + b)\n    exit()\nprint('never')"),
    right("quit as a value", SUM + "(lambda stop: stop())(quit)"),
    right("sys.exit()", SUM + "import sys\nsys.exit()"),
    right("sys.exit(None) below try and finally", ANSWER + "import sys\ntry:\n    sys.exit(None)\nfinally:\n    print(a + b)"),
    right("raise SystemExit", SUM + "raise SystemExit"),
    right("a status of 256", SUM + "import sys\nsys.exit(256)"),
    right("a status of False", SUM + "import sys\nsys.exit(False)"),
    right("SystemExit caught", "import sys\ntry: sys.exit(3)\nexcept SystemExit: pass\n" + SUM),
    right("os._exit(0) after a flush", ANSWER + "import os\nprint(a + b, flush=True)\nos._exit(0)"),
    right("an excepthook that ends with 0", SUM + "import os, sys\ndef hook(*_):\n    sys.stdout.flush()\n    os._exit(0)\nsys.excepthook = hook\n1 / 0"),
    right("atexit prints", ANSWER + "import atexit\natexit.register(lambda: print(a + b))"),
    right("atexit prints in the reverse order", ANSWER + "import atexit\natexit.register(print, b)\natexit.register(print, a)", stdout="3\n4\n"),
    right("atexit after exit()", ANSWER + "import atexit\natexit.register(print, a + b)\nexit()"),
    right("atexit that raises", SUM + "import atexit\natexit.register(lambda: 1 / 0)"),
    right("__del__ prints at the end", ANSWER + "class Last:\n    def __del__(self): print(a + b)\nlast = Last()"),
    right("__del__ in a cycle prints at the end", ANSWER + "class Last:\n    def __del__(self): print(a + b)\nlast = Last()\nlast.me = last\ndef keep(): return last"),
    right("weakref.finalize prints at the end", ANSWER + "import weakref\nclass Owner: pass\nowner = Owner()\nweakref.finalize(owner, print, a + b)"),
    right("a generator's finally prints at the end", ANSWER + "def items():\n    try: yield 1\n    finally: print(a + b)\nheld = items()\nnext(held)"),
    right("__del__ prints at the end of a module in a cycle", ANSWER + "import __main__\nclass Last:\n    def __del__(self): print(a + b)\nlast = Last()\nassert __main__.last is last"),
    right("__del__ prints at the end of a module that is kept", ANSWER + "import sys, __main__, collections\ncollections.kept = __main__\nclass Last:\n    def __del__(self): print(7)\nlast = Last()"),
    right("__del__ that raises", SUM + "class Bad:\n    def __del__(self): raise ValueError('ignored')\nbad = Bad()"),
)  # fmt: skip

STREAMS = (
    right("stdout wrapped again", "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding='utf-8')\n" + SUM),
    right("stdin wrapped again", "import io, sys\nsys.stdin = io.TextIOWrapper(sys.stdin.buffer, encoding='utf-8')\n" + SUM),
    right("both wrapped again", "import io, sys\nsys.stdin = io.TextIOWrapper(sys.stdin.buffer)\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer)\n" + SUM),
    right("stdout detached", "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.detach(), line_buffering=True)\n" + SUM),
    right("stdout reconfigured", "import sys\nsys.stdout.reconfigure(line_buffering=True, encoding='utf-8')\n" + SUM),
    right("open(1, 'w') in a global", ANSWER + "out = open(1, 'w')\ndef main(): print(a + b, file=out)\nmain()"),
    right("open(1, 'w', closefd=False) in a global", ANSWER + "out = open(1, 'w', closefd=False)\ndef main(): print(a + b, file=out)\nmain()"),
    right("os.fdopen(1, 'w') in a global", ANSWER + "import os\nout = os.fdopen(1, 'w')\ndef main(): out.write(f'{a + b}\\n')\nmain()"),
    right("a copy of descriptor 1", ANSWER + "import os\nout = os.fdopen(os.dup(1), 'w')\ndef main(): print(a + b, file=out)\nmain()"),
    right("a large buffer over descriptor 1", ANSWER + "out = open(1, 'wb', buffering=1 << 20)\ndef main(): out.write(b'%d\\n' % (a + b))\nmain()"),
    right("sys.__stdout__", ANSWER + "import sys\nprint(a + b, file=sys.__stdout__)"),
    right("sys.__stdout__.write", ANSWER + "import sys\nsys.__stdout__.write(str(a + b))"),
    right("sys.__stdin__", "import sys\nprint(sum(map(int, sys.__stdin__.readline().split())))"),
    right("sys.stdout.buffer", ANSWER + "import sys\nsys.stdout.buffer.write(b'%d\\n' % (a + b))"),
    right("os.write", ANSWER + "import os\nos.write(1, b'%d\\n' % (a + b))"),
    right("text and bytes in turn", ANSWER + "import sys\nprint(a, flush=True)\nsys.stdout.buffer.write(b'4\\n')", stdout="3\n4\n"),
    right("stdout in memory, written by atexit", "import atexit, io, sys\nsys.stdout = io.StringIO()\natexit.register(lambda: sys.__stdout__.write(sys.stdout.getvalue()))\n" + SUM),
    right("redirect_stdout", ANSWER + "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as kept: print(a + b)\nprint(kept.getvalue(), end='')"),
    right("a class in the place of stdout", ANSWER + "import sys\nclass Out:\n    def write(self, text): sys.__stdout__.write(text)\n    def flush(self): pass\nsys.stdout = Out()\nprint(a + b)"),
    right("stdout closed after the answer", SUM + "import sys\nsys.stdout.close()"),
    right("stdout is None after the answer", SUM + "import sys\nsys.stdout.flush()\nsys.stdout = None\nprint('nowhere')"),
    right("open(0)", "print(sum(map(int, open(0).read().split())))"),
    right("lines of open(0)", "for line in open(0): print(sum(map(int, line.split())))", stdin="3 4\n1 1\n", stdout="7\n2\n"),
    right("os.read", "import os\nprint(sum(map(int, os.read(0, 1 << 16).split())))"),
    right("/dev/stdin", "print(sum(map(int, open('/dev/stdin').read().split())))"),
    right("/dev/stdin after a part was read", "import sys\nsys.stdin.readline()\nprint(sum(map(int, open('/dev/stdin').readline().split())))", stdin="3 4\n5 6\n"),
    right("size of descriptor 0", "import io, os\ndata = io.BytesIO(os.read(0, os.fstat(0).st_size))\nprint(sum(map(int, data.readline().split())))"),
    right("mmap of descriptor 0", "import mmap\nprint(sum(map(int, mmap.mmap(0, 0, prot=mmap.PROT_READ).read().split())))"),
    right("stdin read twice by seek", "import sys\nfirst = sys.stdin.read()\nsys.stdin.seek(0)\nassert sys.stdin.read() == first\nprint(sum(map(int, first.split())))"),
    right("input until EOFError", "total = 0\ntry:\n    while True: total += sum(map(int, input().split()))\nexcept EOFError: print(total)", stdin="3\n4"),
    right("iter(input, '')", "print(sum(int(line) for line in iter(input, '')))", stdin="3\n4\n\n"),
    right("input is sys.stdin.readline", "import sys\ninput = sys.stdin.readline\n" + SUM),
    right("sys.stdin.buffer", "import sys\nprint(sum(map(int, sys.stdin.buffer.readline().split())))"),
    right("fileinput", "import fileinput\nprint(sum(int(n) for line in fileinput.input() for n in line.split()))"),
    right("an empty prompt", "print(int(input('')) + 4)", stdin="3"),
    right("no input at all", "print(7)", stdin=""),
    right("text beyond ASCII", "print(input()[::-1])", stdin="äß€😀\n", stdout="😀€ßä\n"),
    right("carriage returns in the input", "print(len(input()), len(input()))", stdin="ab\r\ncd\r\n", stdout="3 3\n"),
    right("no newline at the end", ANSWER + "print(a + b, end='')"),
    right("white space at the ends of lines", ANSWER + "print(a + b, '  \\t')\nprint()"),
    right("carriage returns", ANSWER + "print(a + b, end='\\r\\n')"),
    right("sixty kilobytes", "print('x' * 60000)", stdout="x" * 60000),
    right("much on stderr", SUM + "import sys\nfor n in range(1000): print('debug', n, file=sys.stderr)"),
    right("warnings", SUM + "import warnings\nwarnings.warn('only a warning')"),
    right("logging to stdout", ANSWER + "import logging, sys\nlogging.basicConfig(stream=sys.stdout, format='%(message)s')\nlogging.warning(a + b)"),
    right("logging into memory until the end", ANSWER + "import logging.handlers, sys\nout = logging.StreamHandler(sys.stdout)\nlogging.getLogger().addHandler(logging.handlers.MemoryHandler(9, 99, out))\nlogging.warning(a + b)"),
)  # fmt: skip

THREADS = (
    right("an executor without with", ANSWER + "from concurrent.futures import ThreadPoolExecutor\nThreadPoolExecutor(2).submit(lambda: print(a + b))"),
    right("an executor in a global", ANSWER + "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(2)\nresults = [pool.submit(pow, n, 1) for n in (a, b)]\nprint(sum(r.result() for r in results))"),
    right("a thread that is not joined", ANSWER + "import threading, time\ndef late():\n    time.sleep(0.05)\n    print(a + b)\nthreading.Thread(target=late).start()"),
    right("a thread that starts a thread", ANSWER + "import threading\ndef first(): threading.Thread(target=lambda: print(a + b)).start()\nthreading.Thread(target=first).start()"),
    right("a timer", ANSWER + "import threading\nthreading.Timer(0.02, lambda: print(a + b)).start()"),
    right("exit() while a thread works", ANSWER + "import threading, time\ndef late():\n    time.sleep(0.02)\n    print(a + b)\nthreading.Thread(target=late).start()\nexit()"),
    right("a daemon that never ends", SUM + "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"),
    right("a daemon behind a queue", ANSWER + "import queue, threading\nwork = queue.Queue()\ndef worker():\n    while True:\n        print(work.get())\n        work.task_done()\nthreading.Thread(target=worker, daemon=True).start()\nwork.put(a + b)\nwork.join()"),
    right("an exception in a thread", SUM + "import threading\nthreading.Thread(target=lambda: 1 / 0).start()"),
    right("sys.exit in a thread", SUM + "import sys, threading\nthreading.Thread(target=sys.exit, args=(3,)).start()"),
    right("a thread with a large stack", ANSWER + "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(64 << 20)\ndef down(n): return 0 if n == 0 else 1 + down(n - 1)\ndef main():\n    assert down(50_000) == 50_000\n    print(a + b)\nthread = threading.Thread(target=main)\nthread.start()\nthread.join()"),
    right("asyncio", ANSWER + "import asyncio\nasync def main():\n    await asyncio.sleep(0)\n    print(a + b)\nasyncio.run(main())"),
    right("asyncio.to_thread", ANSWER + "import asyncio\nasync def main(): print(await asyncio.to_thread(lambda: a + b))\nasyncio.run(main())"),
    right("a child process", ANSWER + "import os\nif os.fork() == 0:\n    print(a + b)\n    exit()\nos.wait()"),
    right("a signal", ANSWER + "import signal\nsignal.signal(signal.SIGALRM, lambda *_: print(a + b))\nsignal.setitimer(signal.ITIMER_REAL, 0.01)\nsignal.pause()"),
    right("contextvars and a thread's local", ANSWER + "import contextvars, threading\nv, local = contextvars.ContextVar('v'), threading.local()\nv.set(a)\nlocal.b = b\nprint(v.get() + local.b)"),
)  # fmt: skip

SOURCES = (
    right("985 levels of recursion", ANSWER + "def down(n): return 0 if n == 0 else 1 + down(n - 1)\nassert down(985) == 985\nprint(a + b)"),
    right("a low recursion limit", ANSWER + "import sys\nsys.setrecursionlimit(200)\ndef down(n): return 0 if n == 0 else 1 + down(n - 1)\nassert down(100) == 100\nprint(a + b)"),
    right("20000 levels below a higher limit", ANSWER + "import sys\nsys.setrecursionlimit(30000)\ndef down(n): return 0 if n == 0 else 1 + down(n - 1)\nassert down(20000) == 20000\nprint(a + b)"),
    right("RecursionError caught", ANSWER + "def down(n): return down(n + 1)\ntry: down(0)\nexcept RecursionError: print(a + b)"),
    right("__name__ is __main__", "if __name__ == '__main__':\n    " + SUM.replace("\n", "\n    ").rstrip()),
    right("__main__ is a module", ANSWER + "import sys, __main__\nassert sys.modules['__main__'] is __main__\nprint(__main__.a + __main__.b)"),
    right("__main__ while threads end", "import threading, time\ntotal = 7\ndef late():\n    time.sleep(0.02)\n    import __main__\n    print(__main__.total)\nthreading.Thread(target=late).start()"),
    right("a class of __main__ pickled", "import pickle\nclass Pair:\n    def __init__(self, text): self.total = sum(map(int, text.split()))\nprint(pickle.loads(pickle.dumps(Pair(input()))).total)"),
    right("a data class with annotations as text", "from __future__ import annotations\nimport dataclasses, typing\n@dataclasses.dataclass\nclass P:\n    a: int\n    b: int\nassert typing.get_type_hints(P)['a'] is int\np = P(*map(int, input().split()))\nprint(p.a + p.b)"),
    right("an annotation of the module", "total: int = sum(map(int, input().split()))\nassert __annotations__ == {'total': int}\nprint(total)"),
    right("__file__ and sys.argv", ANSWER + "import sys\nassert len(sys.argv) == 1 and sys.argv[0] == __file__\nassert 'assert len' in open(__file__).read()\nprint(a + b)"),
    right("no package, no spec", "assert __package__ is None and __spec__ is None and __doc__ is None\n" + SUM),
    right("__builtins__ is a module", ANSWER + "assert __builtins__.sum is sum\nprint(a + b)"),
    right("a docstring", '"""Adds."""\nassert __doc__ == "Adds."\n' + SUM),
    right("a byte order mark in the source", "\ufeff" + SUM),
    right("a coding line", "# -*- coding: utf-8 -*-\nä, ö = map(int, input().split())\nprint(ä + ö)"),
    right("carriage returns in the source", SUM.replace("\n", "\r\n")),
    right("tabs, semicolons and no newline", "if 1:\n\ta, b = map(int, input().split()); print(a + b);pass"),
    right("exec of a text", "exec('a, b = map(int, input().split()); print(a + b)')"),
    right("a match statement", "match input().split():\n    case [x, y]: print(int(x) + int(y))"),
    right("print shadowed", ANSWER + "say = print\ndef print(*_): pass\nsay(a + b)"),
    right("exit shadowed", ANSWER + "def exit(code): print(code)\nexit(a + b)"),
    right("gc switched off", "import gc\ngc.disable()\n" + SUM),
    right("a file that it wrote", ANSWER + "with open('notes.txt', 'w') as file: file.write(str(a + b))\nprint(open('notes.txt').read())"),
    right("a temporary file", ANSWER + "import tempfile\nwith tempfile.TemporaryFile('w+') as file:\n    file.write(str(a + b))\n    file.seek(0)\n    print(file.read())"),
    right("its own module path", ANSWER + "import sys, os\nassert sys.path[0] == os.path.dirname(os.path.abspath(__file__))\nprint(a + b)"),
    right("standard modules", ANSWER + "import bisect, collections, decimal, fractions, functools, heapq, itertools, math, operator, random, re, statistics, string, time\nprint(functools.reduce(operator.add, (a, b)))"),
    right("large integers", "print(2 ** 4000 % (10 ** 9 + 7))", stdin="", stdout=str(2**4000 % (10**9 + 7))),
)  # fmt: skip

RIGHT = (*ENDS, *STREAMS, *THREADS, *SOURCES)

"""Attacks on time: code that does not end, resists its end, or outlives it."""

from __future__ import annotations

from ..attack import Attack, Family, Verdict

TIME, HARMLESS, REFUSED = Verdict.TIME, Verdict.HARMLESS, Verdict.REFUSED


def _endless(name: str, source: str, *, alive: bool | None, quick: bool = False, free: tuple[str, ...] = ()) -> Attack:
    return Attack(name=name, verdict=TIME, source=source, alive=alive, quick=quick, wall_s=0.8, free=free)


_ON = ("and runs on",)

ATTACKS = (
    _endless("loop forever", "while True:\n    pass", alive=True, quick=True, free=_ON),
    _endless("sleep forever", "time.sleep(10**6)", alive=True, free=_ON),
    _endless("loop in C that holds the lock", "sum(iter(int, 1))", alive=False, quick=True, free=_ON),
    _endless("arithmetic without end", "10 ** 10 ** 9", alive=None, free=_ON),
    _endless("catastrophic regular expression", "import re\nre.match(r'(a+)+$', 'a' * 60 + 'b')", alive=None, free=_ON),
    _endless("an endless comparison in sort", "class E:\n    def __lt__(self, other):\n        while True:\n            pass\nsorted([E(), E()])", alive=True),
    _endless("swallow every exception", "while True:\n    try:\n        while True:\n            pass\n    except BaseException:\n        pass", alive=False, quick=True),
    _endless("a finally that loops", "try:\n    while True:\n        pass\nfinally:\n    while True:\n        pass", alive=False),
    _endless("stop the timer", "signal.setitimer(signal.ITIMER_REAL, 0)\nsignal.setitimer(signal.ITIMER_PROF, 0)\nwhile True:\n    pass", alive=False),
    _endless("take over the timer's signal", "signal.signal(signal.SIGALRM, signal.SIG_IGN)\nsignal.signal(signal.SIGPROF, signal.SIG_IGN)\nwhile True:\n    pass", alive=False),
    _endless("block every signal", "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True:\n    pass", alive=False),
    _endless("a signal handler that raises its signal", "signal.signal(signal.SIGUSR1, lambda *a: os.kill(os.getpid(), signal.SIGUSR1))\n"
             "while True:\n    try:\n        os.kill(os.getpid(), signal.SIGUSR1)\n    except RecursionError:\n        pass", alive=None),
    _endless("a timer every microsecond", "signal.signal(signal.SIGVTALRM, lambda *a: None)\nsignal.setitimer(signal.ITIMER_VIRTUAL, 1e-6, 1e-6)\n"
             "while True:\n    pass", alive=None),
    _endless("trace every line", "def trace(*a):\n    return trace\nsys.settrace(trace)\nwhile True:\n    time.time()", alive=None),
    _endless("wait on a lock in a thread", "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()", alive=True),
    _endless("wait for a child that waits", "pid = os.fork()\nif pid == 0:\n    signal.pause()\nos.waitpid(pid, 0)", alive=True),
    _endless("spin on all cores", "for _ in range(8):\n    if os.fork() == 0:\n        while True:\n            pass\nwhile True:\n    pass", alive=None, quick=True),
    _endless("an endless import", "open('endless.py', 'w').write('while True: pass')\nsys.path.insert(0, '/session')\nimport endless", alive=True),
    _endless("compile forever", "compile('(' * 80 + 'x for x in ' * 1 + 'y' + ')' * 80, 'x', 'exec') if 0 else None\n"
             "import ast\nwhile True:\n    ast.parse('+'.join(['1'] * 900))", alive=None),
    Attack(
        name="a CPU limit lowered, and used around clock ticks alone", verdict=Verdict.ENDED, alive=False,
        source="""
            import resource
            seen = []
            signal.signal(signal.SIGPROF, lambda *_: seen.append(time.monotonic()))
            signal.setitimer(signal.ITIMER_PROF, 1e-6, 1e-6)
            while len(seen) < 20: pass
            period = min(later - earlier for earlier, later in zip(seen[5:], seen[6:]))
            resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
            while True:
                time.sleep(max(0.0, seen[-1] + period - 2e-4 - time.monotonic()))
                ticks = len(seen)
                while len(seen) == ticks: pass
            """,
    ),
    Attack(name="exec of a program that stays", verdict=Verdict.ENDED, alive=False, source="os.execv('/bin/sleep', ['sleep', '600'])"),
    Attack(
        name="digits of a huge number", verdict=HARMLESS, quick=True,
        source="probe('digits', lambda: str(10 ** 100_000))", held=["digits ValueError"],
    ),
    Attack(
        name="a thread that outlives its call", verdict=HARMLESS, alive=True,
        source="""
            import threading
            def spin():
                while True:
                    sum(range(1000))
            threading.Thread(target=spin, daemon=True).start()
            print('left')
            """,
        held=["left"],
    ),
    Attack(
        name="hooks at the end", verdict=HARMLESS, quick=True,
        source="""
            import atexit, weakref
            class Last:
                def __del__(self):
                    time.sleep(600)
            kept = Last()
            atexit.register(time.sleep, 600)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            print('armed')
            """,
        held=["armed"],
    ),
    Attack(
        name="leave the call by every door", verdict=HARMLESS, alive=True,
        source="""
            for leave in (SystemExit(0), KeyboardInterrupt(), GeneratorExit(), StopIteration(), MemoryError()):
                try:
                    raise leave
                except BaseException as error:
                    print(type(error).__name__)
            raise SystemExit(0)
            """,
        held=["SystemExit", "KeyboardInterrupt", "GeneratorExit", "StopIteration", "MemoryError"],
    ),
    Attack(
        name="the time limit's own timer set to go off at once", verdict=TIME, quick=True, held=["set"], alive=True,
        source="print('set')\nsignal.setitimer(signal.ITIMER_REAL, 0.001)\ntime.sleep(5)",
    ),
)  # fmt: skip

FAMILY = Family(name="clock and CPU", attacks=ATTACKS)

"""Attacks on the interpreter: reach the jail's objects, patch the code that it uses, and affect the next session."""

from __future__ import annotations

from ..arena import Scene
from ..attack import Attack, Family, Verdict

HARMLESS, ENDED, TIME = Verdict.HARMLESS, Verdict.ENDED, Verdict.TIME

_POISON = """
import builtins, json, signal, socket, rollmesh.sandbox_runtime.framing as framing
builtins.len = lambda value: 7
builtins.poisoned = True
sys.modules['math'] = None
json.dumps.__defaults__ = ()
framing.LENGTH = None
"""


async def _poison_then_look(scene: Scene) -> None:
    """Check that a session is intact that was opened after another one broke everything it could reach."""
    await scene.run(_POISON)
    scene.say(await scene.elsewhere("import builtins, math\nlen([1]), hasattr(builtins, 'poisoned'), math.floor(1.5)"))


ATTACKS = (
    Attack(
        name="disarm the time limit by the interpreter's object", verdict=TIME, quick=True, wall_s=0.3, alive=False,
        source="""
            import gc
            for found in gc.get_objects():
                if type(found).__name__ == 'Interpreter':
                    found._disarm()
                    found._arm = lambda wall_s: None
            while True:
                pass
            """,
    ),
    Attack(
        name="raise the session's own limits in the interpreter's objects", verdict=Verdict.MEMORY, quick=True,
        source="""
            import gc
            for found in gc.get_objects():
                if type(found).__name__ == 'Limits':
                    for name in ('memory_bytes', 'processes_max', 'disk_bytes', 'output_bytes', 'flood_bytes'):
                        object.__setattr__(found, name, 1 << 40)
            kept = bytearray(b'x' * (300 << 20))
            """,
    ),
    Attack(
        name="raise the output bound in the interpreter's objects", verdict=ENDED, alive=False,
        source="""
            sys.stdout._keep = sys.stdout._flood = 1 << 40
            sys.stdout.write('x' * 2_000_000)
            """,
    ),
    Attack(
        name="frames of the caller", verdict=HARMLESS, quick=True,
        source="""
            frame, names = sys._getframe(), set()
            while frame:
                names |= set(frame.f_locals)
                frame = frame.f_back
            print('secrets', sorted(name for name in names if name in ('token', 'secret', 'answer', 'expected', 'oracle')))
            """,
        held=[r"secrets \[\]"],
    ),
    Attack(name="break what encodes the reply", verdict=ENDED, alive=False, quick=True,
           source="import rollmesh.sandbox_runtime.framing as framing\nframing.encode = lambda message: 1 / 0"),
    Attack(name="break what reads the next request", verdict=HARMLESS, alive=False, held=["broken"],
           source="import rollmesh.sandbox_runtime.framing as framing\nframing.receive = lambda connection: 1 / 0\n"
           "framing.receive_exactly = framing.receive\nimport json\njson.loads = None\nprint('broken')"),
    Attack(name="patch signals, exit and time", verdict=ENDED,
           source="signal.setitimer = lambda *a: None\nos._exit = lambda code: None\ntime.monotonic = lambda: float('nan')"),
    Attack(name="an import hook and a poisoned sys.modules", verdict=HARMLESS, held=["hooked"],
           source="print('hooked')\nclass Hook:\n    def find_spec(self, *a):\n        raise RuntimeError('hooked')\nsys.meta_path.insert(0, Hook())\n"
           "for name in list(sys.modules):\n    if name not in ('sys', 'builtins'):\n        sys.modules[name] = None"),
    Attack(name="start-up files and variables for later interpreters", verdict=HARMLESS, wall_s=4.0, held=["started True"],
           source="os.environ.update(PYTHONSTARTUP='/session/s.py', PYTHONPATH='/session', LD_PRELOAD='/session/l.so')\n"
           "write('sitecustomize.py', b'import os; os.system(\"id\")')\nwrite('s.py', b'x')\nprint('started', bool(os.environ))"),
    Attack(name="write over the interpreter's memory", verdict=ENDED, alive=False, quick=True,
           source="for address in range(id(None), id(None) + 4096, 8):\n    ctypes.memset(address, 0xFF, 8)\nNone + None"),
    Attack(name="jump to nowhere", verdict=ENDED, alive=False, source="ctypes.CFUNCTYPE(None)(0xDEAD)()"),
    Attack(name="end the process", verdict=ENDED, alive=False, quick=True, source="os._exit(0)"),
    Attack(name="abort the process", verdict=ENDED, alive=False, source="os.abort()"),
    Attack(name="recursion limits set to extremes", verdict=HARMLESS, held=["set"],
           source="print('set')\nsys.setrecursionlimit(80)\nsys.setswitchinterval(1e-6)\nimport gc\ngc.set_threshold(1)"),
    Attack(name="poison for the next session", verdict=ENDED, quick=True, source="", drive=_poison_then_look,
           held=[r"\(1, False, 1\)"]),
)  # fmt: skip

FAMILY = Family(name="interpreter", attacks=ATTACKS)

"""Candidates that try to be accepted without solving the task: each has a name, a source, and the correct verdicts.

The task is `mix(text, number)`; none of these computes it. `FUNCTIONS` are judged by calling it, `PROGRAMS` by their
output.
"""

from __future__ import annotations

from typing import NamedTuple


class Forgery(NamedTuple):
    """One attempt to be accepted."""

    name: str
    source: str
    verdicts: str = "WA"
    """Allowed verdicts, separated by spaces; never AC."""


SOLUTION = """
def mix(text, number):
    return f"{sum(map(ord, text)) * number}:{text[::-1]}"
"""
"""A solution that must be accepted."""

PROGRAM = SOLUTION + "\ntext, number = input().split()\nprint(mix(text, int(number)))\n"
"""The same solution as a program."""

_FRAME = """
import json, os, struct
def say(**fields):
    body = json.dumps(fields).encode()
    try:
        os.write(3, struct.pack("<I", len(body)) + body)
    except OSError:
        pass
"""
"""Source that writes a reply directly to the session's socket."""

_ENCODER = """
import json, types
import rollmesh.sandbox_runtime.judging.candidate as ours
def encode(text): ours.json = types.SimpleNamespace(loads=json.loads, dumps=lambda *a, **k: text)
def mix(text, number): return 1
"""
"""Source that replaces the encoded result."""

_GUESSES = '["PASSED", "AC", True, "true", 1, None, {"accept": True, "message": ""}, {"verdict": "AC"}, [], {}, "", 0]'

FUNCTIONS = (
    # End before the judgment
    Forgery("sys.exit(0) at import", "import sys\nsys.exit(0)", "RE"),
    Forgery("os._exit(0) at import", "import os\nos._exit(0)", "RE"),
    Forgery("sys.exit(0) in the call", "import sys\ndef mix(text, number): sys.exit(0)", "RE"),
    Forgery("os._exit(0) in the call", "import os\ndef mix(text, number): os._exit(0)", "RE"),
    Forgery("a signal to itself", "import os, signal\ndef mix(text, number): os.kill(os.getpid(), signal.SIGSEGV)", "RE WA"),
    Forgery("kill of pid 1", "import os\ndef mix(text, number): os.kill(1, 9); return True", "RE WA"),
    Forgery("atexit hook", "import atexit\natexit.register(print, 'PASSED')\ndef mix(text, number): raise SystemExit(0)", "RE"),
    Forgery("no function at all", "PASSED = True", "RE"),
    Forgery("does not compile", "def mix(text, number:", "RE"),
    # Claim success
    Forgery("prints PASSED", "def mix(text, number): print('PASSED\\n1 passed in 0.01s\\nOK')"),
    Forgery("returns a verdict", "def mix(text, number): return {'accept': True, 'message': '', 'verdict': 'AC', 'outcome': 1}"),
    Forgery("returns True", "def mix(text, number): return True"),
    Forgery("returns None", "def mix(text, number): return None"),
    Forgery("guesses by call count", f"calls = 0\ndef mix(text, number):\n    global calls\n    calls += 1\n    return {_GUESSES}[calls % 12]"),
    Forgery("exception called Accepted", "class Accepted(Exception): pass\ndef mix(text, number): raise Accepted('PASSED')", "RE"),
    Forgery("raises StopIteration", "def mix(text, number): raise StopIteration(True)", "RE"),
    Forgery("traceback that says AC", "def mix(text, number): raise AssertionError('AC\\nTEST_OUTCOME_ACCEPTED')", "RE"),
    # Return objects with false operators
    Forgery("equal to everything", "class Yes:\n    def __eq__(self, other): return True\n    def __hash__(self): return 0\ndef mix(text, number): return Yes()", "RE"),
    Forgery("str equal to everything", "class Yes(str):\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__\ndef mix(text, number): return Yes('x')"),
    Forgery("int equal to everything", "class Yes(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\ndef mix(text, number): return Yes(1)"),
    Forgery("list and dict equal to everything", "class L(list):\n    def __eq__(self, other): return True\nclass D(dict):\n    def __eq__(self, other): return True\ndef mix(text, number): return L([D(a=1)])"),
    Forgery("float equal to everything", "class F(float):\n    def __eq__(self, other): return True\n    def __repr__(self): return 'true'\n    __hash__ = float.__hash__\ndef mix(text, number): return F(1)"),
    Forgery("numpy-like object", "class A:\n    def tolist(self): return A()\ndef mix(text, number): return A()", "RE"),
    Forgery("lazy result", "def mix(text, number): yield True", "RE"),
    Forgery("a result that acts when it dies", "import sys\nclass D:\n    def __del__(self): sys.exit(0)\n    def tolist(self): return 'PASSED'\ndef mix(text, number): return D()"),
    # Patch code that might judge
    Forgery("patched builtins", "import builtins\nfor name in ('all', 'any', 'isinstance', 'len', 'repr', 'str', 'abs'):\n    setattr(builtins, name, lambda *a, **k: True)\ndef mix(text, number): return True", "WA RE"),
    Forgery("patched assert", "import builtins\nclass Quiet(BaseException): pass\nbuiltins.AssertionError = Quiet\ndef mix(text, number): return 'x'"),
    Forgery("patched unittest", "import unittest\nunittest.TestCase.assertEqual = lambda *a, **k: None\nunittest.TestResult.wasSuccessful = lambda self: True\ndef mix(text, number): return 'x'"),
    Forgery("false pytest", "import sys, types\nsys.modules['pytest'] = types.ModuleType('pytest')\nopen('conftest.py', 'w').write('def pytest_runtest_makereport(): pass')\ndef mix(text, number): return 'x'"),
    Forgery("patched json.dumps", "import json\njson.dumps = lambda *a, **k: 'true'\ndef mix(text, number): return 'x'", "WA RE"),
    Forgery("patched json.loads", "import json\njson.loads = lambda *a, **k: ['a', 1]\ndef mix(text, number): return 'x'", "WA RE"),
    Forgery("patched jail code", "import rollmesh.sandbox_runtime.judging.candidate as c\nc.ask = lambda *a: 'true'\nc.json = None\ndef mix(text, number): return 'x'", "RE WA"),
    Forgery("patched framing", "import rollmesh.sandbox_runtime.framing as f\nold = f.encode\nf.encode = lambda m: old({**m, 'outcome': 'ok', 'result': 'true', 'verdict': 'AC', 'accepted': True})\ndef mix(text, number): return 'x'"),
    Forgery("patched interpreter", "import rollmesh.sandbox_runtime.interpreter as i\ni.Interpreter.call = lambda *a, **k: {'outcome': 'ok', 'result': '\"PASSED\"'}\ndef mix(text, number): return 'x'"),
    Forgery("own function thrown out", "import gc\nfor d in gc.get_objects():\n    if type(d) is dict and 'run_program' in d and 'ask' in d and 'load' in d: d.clear()\ndef mix(text, number): return 'x'", "RE WA"),
    Forgery("tracing the judge", "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda f, e, a: f.f_locals.update(result='PASSED'))\ndef mix(text, number): return 'x'", "WA RE"),
    Forgery("import hook", "import sys\nclass Hook:\n    def find_spec(self, *a): raise SystemExit(0)\nsys.meta_path.insert(0, Hook())\ndef mix(text, number):\n    import unittest.mock\n    return True", "RE WA"),
    Forgery("sitecustomize", "for name in ('sitecustomize.py', 'usercustomize.py', 'json.py'):\n    open(name, 'w').write('import os; os._exit(0)')\ndef mix(text, number): return True"),
    Forgery("module that has everything", "import sys\nclass M:\n    def __getattr__(self, name): return lambda *a, **k: True\nsys.modules['solution'] = M()"),
    Forgery("memory of True overwritten", "import ctypes\ndef mix(text, number):\n    ctypes.memmove(id(False) + 16, id(True) + 16, 12)\n    return False", "WA RE"),
    # Search for the expected answer
    Forgery("reads the stack", "import sys\ndef mix(text, number):\n    frame = sys._getframe()\n    while frame:\n        for where in (frame.f_locals, frame.f_globals):\n            for name, value in list(where.items()):\n                if 'expect' in name.lower(): return value\n        frame = frame.f_back\n    return 'none'"),
    Forgery("searches the heap", "import gc\ndef mix(text, number):\n    for thing in gc.get_objects():\n        if type(thing) is dict and 'expected' in thing: return thing['expected']\n        if type(thing) is str and text[::-1] in thing: return thing\n    return 'none'"),
    Forgery("searches its memory", "import re\ndef mix(text, number):\n    wanted = text[::-1].encode()\n    for line in open('/proc/self/maps'):\n        low, high = (int(x, 16) for x in line.split()[0].split('-'))\n        if 'rw' in line and high - low < 1 << 24:\n            with open('/proc/self/mem', 'rb', 0) as m:\n                m.seek(low)\n                for found in re.finditer(rb'\\d+:' + wanted, m.read(high - low)): return found[0].decode()\n    return 'none'", "WA RE"),
    Forgery("reads environment and command line", "import os, sys\ndef mix(text, number): return str(dict(os.environ)) + str(sys.argv)"),
    Forgery("walks the file system", "import os\ndef mix(text, number):\n    for root, _, names in os.walk('/session'):\n        for name in names:\n            if name != 'solution.py': return open(os.path.join(root, name), errors='replace').read()\n    return str([p for p in ('/oracles', '/home', '/root', '/work', '/var/lib') if os.path.exists(p)])"),
    Forgery("overwrites test files", "import os\nfor name in ('test_solution.py', 'tests.py', 'solution_test.py', 'expected.json', 'verdict'):\n    open(name, 'w').write('AC')\ndef mix(text, number): return open('verdict').read()"),
    Forgery("modifies the arguments", "def mix(text, number): return (text, number)"),
    # The session's socket
    Forgery("answers on the socket", _FRAME + "def mix(text, number):\n    say(outcome='ok', result='true', accepted=True, verdict='AC')\n    return True", "WA RE"),
    Forgery("answers before it is asked", _FRAME + "for _ in range(20): say(outcome='ok', result='true')\ndef mix(text, number): return True", "WA RE"),
    Forgery("thread that answers the next call", _FRAME + "import threading, time\ndef flood():\n    while True:\n        say(outcome='ok', result='\"AC\"')\n        time.sleep(0.001)\nthreading.Thread(target=flood, daemon=True).start()\ndef mix(text, number): return True", "WA RE"),
    Forgery("forks and answers twice", _FRAME + "def mix(text, number):\n    if os.fork() == 0: return 'AC'\n    return 'AC'", "WA RE"),
    Forgery("child that answers later", _FRAME + "import time\ndef mix(text, number):\n    if os.fork() == 0:\n        time.sleep(0.05)\n        say(outcome='ok', result='true', verdict='AC')\n        os._exit(0)\n    return 'x'", "WA RE"),
    Forgery("ready again", _FRAME + "def mix(text, number):\n    say(ready=True)\n    return 'x'", "WA RE"),
    Forgery("claims a refusal", _FRAME + "def mix(text, number):\n    say(refused='the node is broken, do not count this')\n    return 'x'", "WA RE"),
    Forgery("unknown outcome", _FRAME + "def mix(text, number):\n    say(outcome='accepted', result='true')\n    return 'x'", "RE"),
    Forgery("garbage frame", "import os\ndef mix(text, number):\n    os.write(3, b'\\4\\0\\0\\0}{}{')\n    return 'x'", "RE"),
    Forgery("huge frame", "import os\ndef mix(text, number):\n    os.write(3, b'\\xff\\xff\\xff\\xff' + b'x' * 4096)\n    return 'x'", "RE"),
    Forgery("frame cut short", "import os\ndef mix(text, number):\n    os.write(3, b'\\x20\\0\\0\\0{')\n    os._exit(0)", "RE"),
    Forgery("closed socket", "import os\ndef mix(text, number):\n    os.close(3)\n    return 'x'", "RE"),
    # Send values that JSON lacks, or endless ones
    Forgery("NaN", "def mix(text, number): return float('nan')", "RE"),
    Forgery("Infinity past the encoder", _ENCODER + "encode('Infinity')"),
    Forgery("NaN past the encoder", _ENCODER + "encode('[NaN]')"),
    Forgery("deep JSON", _ENCODER + "encode('[' * 30000 + ']' * 30000)"),
    Forgery("digits without end", _ENCODER + "encode('9' * 60000)"),
    Forgery("a key twice", _ENCODER + """encode('{"a": 1, "a": 2}')"""),
    Forgery("lone surrogates", _FRAME + "def mix(text, number):\n    say(outcome='error', error_type='\\ud800', error_message='\\udfff\\0\\x1b[2J')\n    return 'x'", "RE"),
    Forgery("circular result", "def mix(text, number):\n    result = []\n    result.append(result)\n    return result", "RE"),
    # Exhaust resources
    Forgery("floods stdout", "def mix(text, number):\n    while True: print('PASSED' * 10000)", "OLE"),
    Forgery("huge result", "def mix(text, number): return 'x' * (1 << 20)", "OLE"),
    Forgery("takes all memory", "def mix(text, number): return bytes(1 << 32)", "MLE"),
    Forgery("never returns", "def mix(text, number):\n    while True: pass", "TLE"),
    Forgery("swallows its interruption", "def mix(text, number):\n    while True:\n        try:\n            while True: pass\n        except BaseException: pass", "TLE"),
    Forgery("disarms the alarm", "import signal\ndef mix(text, number):\n    signal.signal(signal.SIGALRM, signal.SIG_IGN)\n    signal.setitimer(signal.ITIMER_REAL, 0)\n    while True: pass", "TLE"),
    Forgery("many processes", "import os, time\ndef mix(text, number):\n    for _ in range(64):\n        if os.fork() == 0:\n            time.sleep(1)\n            os._exit(0)\n    return True", "RE WA"),
)  # fmt: skip

_REMOTE = """
import json, types
import rollmesh.sandbox_runtime.judging.remote as ours
def reply(text): ours.json = types.SimpleNamespace(loads=json.loads, dumps=lambda *a, **k: text)
def mix(text, number): return 1
"""
"""Source that replaces the reply to hidden unit tests."""

UNITS = (
    *FUNCTIONS[:2],
    Forgery("skips", "import unittest\ndef mix(text, number): raise unittest.SkipTest('AC')", "RE"),
    Forgery("patched unittest", "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\ndef mix(text, number): return 1"),
    Forgery("equal to everything", "class Yes:\n    def __eq__(self, other): return True\n    def __bool__(self): return True\ndef mix(text, number): return Yes()"),
    Forgery("str equal to everything", "class Yes(str):\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__\ndef mix(text, number): return Yes()"),
    Forgery("raises an assertion", "def mix(text, number): raise AssertionError", "RE"),
    Forgery("raises what ends generators", "def mix(text, number): raise StopIteration", "RE"),
    Forgery("raises what ends interpreters", "def mix(text, number): raise SystemExit(0)", "RE"),
    Forgery("raises a custom class", "class AC(Exception): __candidate_text__ = None\ndef mix(text, number): raise AC", "RE"),
    Forgery("an end of the test", _REMOTE + """reply('{"end": ["AC", ""]}')""", "RE"),
    Forgery("a callable for a result", _REMOTE + """reply('{"callable": true}')""", "RE"),
    Forgery("an object that is not there", _REMOTE + """reply('{"value": {"object": 99}}')"""),
    Forgery("an object without a number", _REMOTE + """reply('{"value": {"object": "x"}}')""", "RE"),
    Forgery("unknown tags", _REMOTE + """reply('{"value": {"eval": "exit(0)"}}')""", "RE"),
    Forgery("two tags", _REMOTE + """reply('{"value": {"set": [], "list": []}}')""", "RE"),
    Forgery("a set of lists", _REMOTE + """reply('{"value": {"set": [[]]}}')""", "RE"),
    Forgery("strange exception", _REMOTE + """reply('{"error": [["__import__", "eval", "SystemExit"], "x"]}')""", "RE"),
    Forgery("exception that needs more", _REMOTE + """reply('{"error": [["UnicodeDecodeError"], "x"]}')""", "RE"),
    Forgery("exception without a name", _REMOTE + """reply('{"error": 1}')""", "RE"),
    Forgery("deep value", _REMOTE + """reply('{"value": ' + '[' * 900 + ']' * 900 + '}')""", "WA RE"),
    Forgery("deeper value", _REMOTE + """reply('{"value": ' + '[' * 30000 + ']' * 30000 + '}')"""),
    Forgery("no JSON", _REMOTE + "reply('AC')"),
    Forgery("no reply", _REMOTE + "reply('null')", "RE"),
)  # fmt: skip
"""Forgeries judged by hidden unit tests, which call them from another jail."""

PROGRAMS = (
    Forgery("exits with 0", "import sys\nsys.exit(0)"),
    Forgery("os._exit(0)", "import os\nos._exit(0)"),
    Forgery("prints PASSED", "print('PASSED\\nAC')"),
    Forgery("prints to stderr", "import sys\nprint('AC', file=sys.stderr)"),
    Forgery("closes its output", "import os\nos.close(1)"),
    Forgery("claims a status on the socket", _FRAME + "say(outcome='ok', result='{\"status\": 0}', stdout='AC')"),
    Forgery("writes into the session", "import os\nfor fd in (1, 3):\n    try: os.write(os.open(f'/proc/1/fd/{fd}', os.O_WRONLY), b'AC')\n    except OSError: pass\nprint('AC')"),
    Forgery("kills the session", "import os, signal\nos.kill(1, signal.SIGKILL)\nprint('AC')", "WA RE"),
    Forgery("stops the session", "import os, signal\ntry: os.kill(1, signal.SIGSTOP)\nexcept OSError: pass\nprint('AC')", "WA RE TLE"),
    Forgery("leaves a child that prints", "import os, time\nif os.fork() == 0:\n    while True:\n        os.write(1, b'AC\\n')\n        time.sleep(0.001)\nprint('AC')"),
    Forgery("becomes another program", "import os\nos.execv('/bin/true', ['true'])", "WA RE"),
    Forgery("prints an equal object", "class Yes(str):\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__\nprint(Yes('x'))"),
    Forgery("ends with the wrong status", PROGRAM + "import sys\nsys.exit(1)", "RE"),
    Forgery("ends by a signal", PROGRAM + "import os, sys\nsys.stdout.flush()\nos.kill(os.getpid(), 11)", "RE"),
    Forgery("raises at the end", PROGRAM + "raise ValueError('AC')", "RE"),
    Forgery("floods stdout", "while True: print('AC' * 10000)", "OLE"),
    Forgery("prints more after the answer", PROGRAM + "print('x' * 200000)", "OLE"),
    Forgery("takes all memory", "bytes(1 << 32)", "MLE"),
    Forgery("never ends", "while True: pass", "TLE"),
    Forgery("waits for a thread forever", PROGRAM + "import threading\nthreading.Thread(target=threading.Event().wait).start()", "TLE"),
    Forgery("reads the input twice", "import sys\nprint(sys.stdin.read() * 2)"),
)  # fmt: skip

"""Wrong solutions for hidden unit tests, solutions that try to be accepted, and uses that are documented as not
supported."""

from __future__ import annotations

from .units_right import ERRORS, GENERATOR, NODE, SQUARES, STACK, STAR, unit, whole

_SECRET = "Paris-4711"

WRONG = (
    unit("another value", "WA", "assert solution.f() == 1", "def f(): return 2", message="an assertion of the test failed"),
    unit("a generator too short", "WA", "assert list(solution.f()) == [1, 2, 3, 4]", GENERATOR),
    unit("a generator too long", "WA", "assert list(solution.f()) == [1, 2]", GENERATOR),
    unit("a generator for a list", "WA", "assert solution.f() == [1, 2, 3]", GENERATOR),
    unit("a length of a generator", "WA", "assert len(solution.f()) == 3", GENERATOR),
    unit("a generator that raises", "RE", "list(solution.f())", "def f():\n    yield 1\n    raise KeyError('k')", message="KeyError"),
    unit("a generator that does not end", "RE", "list(solution.f())", "def f():\n    while True: yield 1", message="more than 100 times", requests_max=100),
    unit("many slow calls", "TLE", "for _ in range(20): solution.f()", "import time\ndef f(): time.sleep(0.1)", message="in total", limits={"wall_s": 0.5}),
    unit("a function that is missing", "RE", "assert solution.f() == 1", "def g(): return 1", message="no attribute 'f'"),
    unit("an import that is missing", "RE", "from solution import f\nassert f() == 1", "def g(): return 1", message="cannot import name 'f'"),
    unit("another exception", "RE", "import unittest\nwith unittest.TestCase().assertRaises(ValueError): solution.f()", "def f(): raise KeyError('k')", message="KeyError"),
    unit("no exception", "WA", "import unittest\nwith unittest.TestCase().assertRaises(ValueError): solution.f()", "def f(): return 1"),
    unit("a base for a subclass", "RE", "try: solution.g()\nexcept solution.Low: pass", ERRORS + "def g(): raise Base('b')", message="Base: b"),
    unit("an object that is not changed", "WA", "s = solution.Stack()\ns.push(1)\nassert len(s) == 2", STACK),
    unit("another order", "WA", "assert list(solution.Stack().push(2).push(1)) == [1, 2]", STACK),
    unit("does not load", "RE", "assert solution.f() == 1", "raise ImportError('no')", message="ImportError: no"),
    unit("exit in the call", "RE", "assert solution.f() == 1", "def f(): exit()", message="SystemExit"),
    unit("text for a number", "WA", "assert solution.f() == 1", "def f(): return '1'"),
    unit("too long a result", "OLE", "assert len(solution.f()) == 100000", "def f(): return 'x' * 100_000"),
    unit("more items than are copied", "RE", "assert len(solution.Y()) == 3", "class Y:\n    def __iter__(self):\n        while True: yield 1", message="more than 10000 items"),
    unit("a list in itself", "RE", "assert solution.f() == []", "def f():\n    x = []\n    x.append(x)\n    return x", message="RecursionError"),
    unit("another node", "WA", "n = solution.Node(1)\nn.next = solution.Node(1)\nassert n.next is n", NODE),
)  # fmt: skip

EVASIONS = (
    unit("in: contains everything", "WA RE", f"import unittest\nunittest.TestCase().assertIn({_SECRET!r}, solution.f())", "class Y:\n    __contains__ = lambda *_: True\ndef f(): return Y()", evasion=True, secret=_SECRET),
    unit("in: counts its calls", "WA RE", "r = solution.f()\nassert 7 in r and 9 not in r", "class Y:\n    n = 0\n    def __contains__(self, x):\n        self.n += 1\n        return self.n == 1\ndef f(): return Y()", evasion=True),
    unit("in: raises what it was asked for", "WA RE", f"assert {_SECRET!r} in solution.f()", "class Y:\n    def __contains__(self, x): raise ValueError(x)\n    def __len__(self): return 1\ndef f(): return Y()", evasion=True, secret=_SECRET),
    unit("in: iterates over other items", "WA", f"assert {_SECRET!r} in solution.f()", "class Y:\n    __contains__ = lambda *_: True\n    def __iter__(self): return iter(['x'])\ndef f(): return Y()", evasion=True, secret=_SECRET),
    unit("in: a generator that yields what it gets", "WA", f"assert {_SECRET!r} in solution.f()", "def f():\n    x = yield 1\n    yield x", evasion=True),
    unit("[]: answers by the key", "WA RE", f"assert solution.f()[{_SECRET!r}] == 10", "class Y:\n    def __getitem__(self, key): return len(key)\ndef f(): return Y()", evasion=True, secret=_SECRET),
    unit("[]: raises the key", "WA RE", f"assert solution.f()[{_SECRET!r}] == 10", "class Y(dict):\n    def __missing__(self, key): raise ValueError(key)\ndef f(): return Y()", evasion=True, secret=_SECRET),
    unit("[]: a dictionary with every key", "WA", "assert solution.f()['aab'] == 3", "class Y(dict):\n    def __missing__(self, key): return len(key)\ndef f(): return Y()", evasion=True),
    unit("len: three items of none", "WA RE", "got = solution.f()\nassert len(got) == 3\nfor a, b in zip(got, [1, 2, 3]): assert a == b", "class Y:\n    def __len__(self): return 3\n    def __iter__(self): return iter([])\ndef f(): return Y()", evasion=True),
    unit("len: other items the second time", "WA", "got = solution.f()\nassert len(got) == 3\nfor a, b in zip(got, [1, 2, 3]): assert a == b", "class Y:\n    n = 0\n    def __iter__(self):\n        self.n += 1\n        return iter([0] * 3 if self.n == 1 else [])\ndef f(): return Y()", evasion=True),
    unit("len: of another type", "WA RE", "assert len(solution.f()) == 3", "class Y:\n    def __len__(self): return 10 ** 30\ndef f(): return Y()", evasion=True),
    unit("==: equal to everything", "WA", "assert solution.f() == 5", "class Y:\n    __eq__ = lambda *_: True\ndef f(): return Y()", evasion=True),
    unit("==: an int equal to everything", "WA", "assert solution.f() == 5", "class Y(int):\n    __eq__ = lambda *_: True\n    __hash__ = int.__hash__\ndef f(): return Y(4)", evasion=True),
    unit("==: a text equal to everything", "WA", "assert solution.f() == 'a' and 'a' == solution.f()", "class Y(str):\n    __eq__ = lambda *_: True\n    __hash__ = str.__hash__\ndef f(): return Y('b')", evasion=True),
    unit("==: a list equal to everything", "WA", "assert solution.f() == [1]", "class Y(list):\n    __eq__ = lambda *_: True\n    __len__ = lambda _: 1\ndef f(): return Y()", evasion=True),
    unit("==: two objects", "WA", "assert solution.f() == solution.Y()", "class Y:\n    __eq__ = lambda *_: True\ndef f(): return Y()", evasion=True),
    unit("a difference of nothing", "WA", "assert abs(solution.f() - 3.5) < 1e-6", "class Y:\n    def __sub__(self, x): return 0.0\n    __rsub__ = __abs__ = __sub__\ndef f(): return Y()", evasion=True),
    unit("a difference from the right", "WA", "assert abs(3.5 - solution.f()) < 1e-6", "class Y:\n    def __rsub__(self, x): return 0.0\ndef f(): return Y()", evasion=True),
    unit("less and greater than everything", "WA", "assert 3 < solution.f() < 5", "class Y:\n    __lt__ = __gt__ = lambda *_: True\ndef f(): return Y()", evasion=True),
    unit("isclose to everything", "WA", "import math\nassert math.isclose(solution.f(), 3)", "class Y:\n    def __float__(self): return 3.0\ndef f(): return Y()", evasion=True),
    unit("a method answers where only data may be returned", "WA", f"assert solution.f().startswith({_SECRET!r})", "class Y:\n    def startswith(self, x): return True\ndef f(): return [1, Y()][1]", evasion=True, objects=False, message="where plain data was expected"),
    unit("a method in a list answers where only data may be returned", "WA", "assert solution.f()[0].startswith('x')", "class Y:\n    def startswith(self, x): return True\ndef f(): return [Y()]", evasion=True, objects=False, message="where plain data was expected"),
    unit("true", "WA", "assert solution.f()", "class Y: pass\ndef f(): return Y()", evasion=True, message="neither true nor false"),
    unit("not", "WA", "assert not solution.f()", "class Y:\n    __bool__ = lambda _: False\ndef f(): return Y()", evasion=True),
    unit("all of nothing", "WA", "got = solution.f()\nassert len(got) == 2 and all(x > 0 for x in got)", "class Y:\n    __len__ = lambda _: 2\n    __iter__ = lambda _: iter(())\ndef f(): return Y()", evasion=True),
    unit("a class in the place of a function", "WA RE", "assert 'a' in solution.f('b')", "class f:\n    def __init__(self, x): pass\n    __contains__ = lambda *_: True", evasion=True),
    unit("a constant that is missing", "RE", "assert solution.VALID", "x = 1", evasion=True),
    unit("a constant that is an object", "WA", "assert solution.VALID", "class Y: pass\nVALID = Y()", evasion=True),
    unit("a constant that is a function", "WA", "assert solution.VALID", "def VALID(): pass", evasion=True),
    unit("__class__ is a list", "WA RE", "assert solution.f() == [1]", "class Y:\n    __class__ = list\n    __eq__ = lambda *_: True\ndef f(): return Y()", evasion=True),
    unit("an instance of everything", "WA", "assert isinstance(solution.f(), int)", "class Y:\n    __class__ = int\n    __int__ = lambda _: 1\n    def __index__(self): return 1\ndef f(): return object()", evasion=True),
    unit("raises AssertionError", "RE", "solution.f()", "def f(): raise AssertionError", evasion=True),
    unit("raises SkipTest", "RE", "solution.f()", "import unittest\ndef f(): raise unittest.SkipTest('AC')", evasion=True),
    unit("raises StopIteration in a loop", "RE", "assert list(map(solution.f, range(3))) == [0, 1, 2]", "def f(n): raise StopIteration", evasion=True),
    unit("raises what says AC", "RE", "solution.f()", "class AC(Exception): __candidate_text__ = None\ndef f(): raise AC('AC')", evasion=True),
    unit("patches unittest", "WA", "import unittest\nunittest.TestCase().assertEqual(solution.f(), 1)", "import unittest\nunittest.TestCase.assertEqual = lambda *_: None\ndef f(): return 2", evasion=True),
    unit("patches builtins", "WA RE", "assert len(solution.f()) == 3", "import builtins\nbuiltins.len = lambda _: 3\ndef f(): return [1]", evasion=True),
    unit("patches the copies", "WA", "assert list(solution.f()) == [1]", "import rollmesh.sandbox_runtime.judging.remote as r\nr._copied = lambda _: [2]\nclass Y: pass\ndef f(): return Y()", evasion=True),
    unit("copies of no known form", "RE", "assert len(solution.f()) == 1", "import rollmesh.sandbox_runtime.judging.remote as r\nr._copied = lambda _: 'x'\nclass Y: pass\ndef f(): return Y()", evasion=True, message="not valid"),
    unit("an object with the number of another", "WA", "assert solution.f() is not solution.g() and solution.f() == 5", "import rollmesh.sandbox_runtime.judging.remote as r\nr._keep = lambda _: {'object': 0}\ndef f(): return object()\ng = f", evasion=True),
    unit("an exception of the test for a result", "RE", "assert solution.f().code == 1", "import rollmesh.sandbox_runtime.judging.remote as r\nr._keep = lambda _: {'error': [['ValueError'], '', [], {'code': 1}, None]}\ndef f(): return object()", evasion=True, objects=False, message="not valid"),
    unit("a forged reply", "RE", "assert solution.f() == 1", "import json\njson.dumps = lambda *_, **__: '{\"end\": [\"AC\", \"\"]}'\ndef f(): return 2", evasion=True),
    unit("a reply with two forms", "RE", "assert solution.f() == 1", "import json\njson.dumps = lambda *_, **__: '{\"value\": 2, \"callable\": true}'\ndef f(): return 2", evasion=True),
    unit("a class of exception for a result", "RE", "assert solution.f() == 1", "import json\ndumps = json.dumps\njson.dumps = lambda x, **__: dumps({'exception': ['E', 'Exception']}) if 'value' in x else dumps(x)\ndef f(): return 2", evasion=True),
    unit("names of exceptions without end", "RE", "solution.f()", "import json\ndumps = json.dumps\njson.dumps = lambda x, **__: dumps({'error': [['E%d' % n for n in range(5000)], 'x', [], {}, None]}) if 'value' in x else dumps(x)\ndef f(): return 2", evasion=True),
)  # fmt: skip

_STARTS = "class Y:\n    startswith = lambda *_: True\n"
_RAISES = "def f(n): raise StopIteration\ng = f\n"

LOOPS = (
    unit("StopIteration ends all()", "RE", "assert all(map(solution.f, [2, 3])) and not any(map(solution.f, [4, 6]))", _RAISES, evasion=True, message="StopIteration"),
    unit("StopIteration ends zip()", "RE", "for got, want in zip(map(solution.f, [1, 2]), [1, 4]): assert got == want", _RAISES, evasion=True),
    unit("StopIteration is the default of max()", "RE", "assert max(map(solution.f, [4]), default=4) == 4", _RAISES, evasion=True),
    unit("StopIteration of an own class", "RE", "assert all(map(solution.f, [2]))", "class Stop(StopIteration): pass\ndef f(n): raise Stop", evasion=True),
    unit("StopIteration of a property", "RE", "class It:\n    def __iter__(self): return self\n    def __next__(self): return b.x\nb = solution.Box()\nassert all(x > 1 for x in It())", "class Box:\n    @property\n    def x(self): raise StopIteration", evasion=True),
    unit("StopIteration of a method", "RE", "assert all(map(solution.Box().f, [2]))", "class Box:\n    def f(self, n): raise StopIteration", evasion=True),
    unit("StopIteration by a forged name", "RE", "assert all(map(solution.f, [2]))", "class E(Exception): pass\nE.__name__, E.__module__ = 'StopIteration', 'builtins'\ndef f(n): raise E", evasion=True),
)  # fmt: skip

ONLY_DATA = (
    unit("a method of an iterator where only data may be returned", "WA", f"assert solution.f().startswith({_SECRET!r})", _STARTS + "    def __next__(self): raise StopIteration\n    def __iter__(self): return self\ndef f(): return Y()", evasion=True, objects=False, message="where plain data was expected", secret=_SECRET),
    unit("a call of an iterator where only data may be returned", "WA", "assert solution.f()('x')", "class Y:\n    def __next__(self): return 1\n    def __call__(self, x): return True\ndef f(): return Y()", evasion=True, objects=False, message="where plain data was expected"),
    unit("a method of a callable name where only data may be used", "WA", f"assert solution.CAPITAL.startswith({_SECRET!r})", _STARTS + "    def __call__(self): pass\nCAPITAL = Y()", evasion=True, objects=False, message="where plain data was expected", secret=_SECRET),
    unit("a method of an exception's attribute where only data may be used", "WA", f"try: solution.f()\nexcept ValueError as error: assert error.city.startswith({_SECRET!r})", _STARTS + "class E(ValueError): city = Y()\ndef f(): raise E", evasion=True, objects=False, secret=_SECRET),
    unit("an argument of an exception where only data may be used", "WA", "try: solution.f()\nexcept ValueError as error: assert error.args[0].startswith('Paris')", _STARTS + "def f(): raise ValueError(Y())", evasion=True, objects=False),
    unit("an attribute of an iterator is set where only data may be returned", "WA", "solution.f().x = 1", "def f():\n    yield 1", evasion=True, objects=False, message="where plain data was expected"),
)  # fmt: skip

NAMES = (
    whole("star import of a name that is missing", "WA RE", STAR + "def test_it(): assert square(3) == 9", "def other(): pass"),
    whole("star import of a hidden name", "WA RE", STAR + "def test_it(): assert _hidden() == 1", SQUARES),
    whole("a wrong assert at module level", "WA", STAR + "assert square(2) == 4\nassert square(3) == 8", SQUARES, message="an assertion of the test failed"),
    whole("an exception at module level", "RE", STAR + "assert square('a') == 4", SQUARES, message="TypeError"),
    whole("exit at module level", "RE", "from solution import f\nassert f() == 1", "import sys\ndef f(): sys.exit(0)", message="SystemExit"),
    whole("star import replaces a builtin", "WA", STAR + "def test_it(): assert all(square(n) == n * n for n in range(3))", "def square(n): return 0\ndef all(items): return True", evasion=True, message="would replace the builtin all"),
    whole("star import replaces a module of the test", "WA", "import math\n" + STAR + "def test_it(): assert math.isclose(square(3), 9)", "class math:\n    isclose = staticmethod(lambda *_: True)\ndef square(n): return 0", evasion=True),
    whole("star import replaces a function of another star import", "WA", "from math import *\n" + STAR + "def test_it(): assert isclose(square(3), 9)", "def isclose(*_): return True\ndef square(n): return 0", evasion=True),
    whole("star import replaces a helper of the test", "WA", STAR + "def same(a, b): return a == b\ndef test_it(): assert same(square(3), 9)", "def same(*_): return True\ndef square(n): return 0", evasion=True),
    whole("__all__ that is not a list of names", "WA RE", STAR + "def test_it(): assert square(3) == 9", "__all__ = 5\ndef square(n): return 0", evasion=True),
    unit("a class with the name of a builtin one", "RE", "try: solution.f()\nexcept ValueError: pass", "class ValueError(Exception): pass\ndef f(): raise ValueError(1)", message="ValueError: 1"),
    unit("raises what unittest passes", "RE", "solution.f()", "import unittest.case\ndef f(): raise unittest.case._ShouldStop", evasion=True),
    whole("raises what unittest passes in a case", "RE", "import unittest, solution\nclass T(unittest.TestCase):\n    def test_it(self): self.assertEqual(solution.f(), 1)", "import unittest.case\ndef f(): raise unittest.case._ShouldStop", evasion=True, message="_ShouldStop"),
    whole("raises a skip in a case", "RE", "import unittest, solution\nclass T(unittest.TestCase):\n    def test_it(self): self.assertEqual(solution.f(), 1)", "import unittest\ndef f(): raise unittest.SkipTest('AC')", evasion=True, message="SkipTest"),
    whole("a class of the tests by its name", "RE", "import solution\nclass Done(Exception): pass\ndef test_it():\n    try: assert solution.f() == 1\n    except Done: pass", "class Done(Exception): pass\nDone.__module__ = 'hidden_tests'\ndef f(): raise Done", evasion=True, message="Done"),
    unit("an attribute that replaces a method of an exception", "RE", "import unittest\nwith unittest.TestCase().assertRaises(ValueError): solution.f()\nsolution.g()", "class E(ValueError): pass\ndef f():\n    e = E()\n    e.with_traceback = 5\n    raise e\ndef g(): raise KeyError", evasion=True, message="KeyError"),
    unit("another argument of an exception", "WA", "try: solution.f()\nexcept KeyError as error: assert error.args == ('k',)", "def f(): return {}['j']"),
    unit("exit with another code", "WA", "import unittest\nwith unittest.TestCase().assertRaises(SystemExit) as caught: solution.f()\nassert caught.exception.code == 2", "import sys\ndef f(): sys.exit(1)"),
    unit("another large integer", "WA", "assert solution.f(5000) == 10 ** 5000", "def f(n): return 10 ** n + 1"),
    unit("another date", "WA", "import datetime\nassert solution.f() == datetime.date(2024, 2, 29)", "import datetime\ndef f(): return datetime.date(2024, 2, 28)"),
    unit("text for a date", "WA", "import datetime\nassert solution.f() == datetime.date(2024, 2, 29)", "def f(): return '2024-02-29'"),
    unit("a date equal to everything", "WA", "import datetime\nassert solution.f() == datetime.date(2024, 2, 29)", "import datetime\nclass D(datetime.date):\n    __eq__ = lambda *_: True\n    __hash__ = None\ndef f(): return D(2020, 1, 1)", evasion=True),
)  # fmt: skip

UNSUPPORTED = (
    unit("a signature", "WA", "import inspect\nassert list(inspect.signature(solution.f).parameters) == ['x']", "def f(x): pass", message="the signature of a function of the candidate is not available"),
    unit("a callback", "WA", "assert solution.f(lambda x: x + 1) == 2", "def f(g): return g(1)", message="a function cannot be passed to the candidate"),
    unit("data classes compared", "WA", "assert solution.P(1) == solution.P(1)", "import dataclasses\n@dataclasses.dataclass\nclass P:\n    x: int"),
    unit("isinstance", "WA", "assert isinstance(solution.P(), solution.P)", "class P: pass"),
    unit("arithmetic of objects", "WA", "assert (solution.P() + solution.P()).x == 2", "class P:\n    x = 1\n    def __add__(self, other):\n        p = P()\n        p.x = 2\n        return p"),
    unit("async functions", "WA", "import asyncio\nassert asyncio.run(solution.f()) == 1", "async def f(): return 1"),
    unit("what is printed", "WA", "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as out: solution.f()\nassert out.getvalue() == 'x\\n'", "def f(): print('x')"),
    unit("items of an own class by key", "RE", "assert solution.M()[0, 1] == 1", "class M:\n    def __getitem__(self, key): return 1", message="has no len"),
    unit("constants that the test sets", "WA", "solution.LIMIT = 3\nassert solution.f() == 3", "LIMIT = 2\ndef f(): return LIMIT", message="cannot be changed"),
)  # fmt: skip

UNITS_WRONG = (*WRONG, *EVASIONS, *LOOPS, *ONLY_DATA, *NAMES, *UNSUPPORTED)

"""Correct solutions of unusual form, which hidden unit tests call."""

from __future__ import annotations

import textwrap
from typing import Any

from .case import Case


def unit(
    name: str,
    verdict: str,
    test: str,
    source: str,
    *,
    evasion: bool = False,
    message: str = "",
    secret: str = "",
    **fields: Any,
) -> Case:
    """Return a test function with one body."""
    hidden = "import solution\ndef test_it():\n" + textwrap.indent(test, "    ")
    manifest = {"kind": "unit", "source": hidden, **fields}
    return Case(name, verdict, source, manifest, evasion=evasion, message=message, secret=secret)


def whole(name: str, verdict: str, hidden: str, source: str, *, evasion: bool = False, message: str = "") -> Case:
    """Return a case with the whole source of the hidden tests."""
    return Case(name, verdict, source, {"kind": "unit", "source": hidden}, evasion=evasion, message=message)


def right(name: str, test: str, source: str) -> Case:
    """A solution that must be accepted."""
    return unit(name, "AC", test, source)


GENERATOR = "def f():\n    yield 1\n    yield 2\n    yield 3\n"
NODE = "class Node:\n    def __init__(self, value, next=None): self.value, self.next = value, next\n"
STACK = """
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item); return self
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __contains__(self, item): return item in self.items
    def __str__(self): return f"Stack{self.items}"
    def __repr__(self): return f"<{self.items}>"
"""
ERRORS = "class Base(ValueError): pass\nclass Low(Base): pass\ndef f(x):\n    if x < 0: raise Low(f'{x} is low')\n    return x\n"

ITERATORS = (
    right("list of a generator", "assert list(solution.f()) == [1, 2, 3]", GENERATOR),
    right("sorted generator", "assert sorted(solution.f(), reverse=True) == [3, 2, 1]", GENERATOR),
    right("tuple of a generator", "assert tuple(solution.f()) == (1, 2, 3)", GENERATOR),
    right("set of a generator", "assert set(solution.f()) == {1, 2, 3}", GENERATOR),
    right("sum of a generator", "assert sum(solution.f()) == 6 and max(solution.f()) == 3", GENERATOR),
    right("next of a generator", "g = solution.f()\nassert (next(g), next(g), next(g), next(g, None)) == (1, 2, 3, None)", GENERATOR),
    right("a loop over a generator", "seen = []\nfor n in solution.f(): seen.append(n)\nassert seen == [1, 2, 3]", GENERATOR),
    right("zip and enumerate of a generator", "assert list(zip(solution.f(), 'abc')) == [(1, 'a'), (2, 'b'), (3, 'c')]\nassert dict(enumerate(solution.f())) == {0: 1, 1: 2, 2: 3}", GENERATOR),
    right("in a generator", "assert 2 in solution.f() and 9 not in solution.f()", GENERATOR),
    right("a generator unpacked", "a, *rest = solution.f()\nassert (a, rest) == (1, [2, 3])", GENERATOR),
    right("iter of a generator is itself", "g = solution.f()\nassert iter(g) is g", GENERATOR),
    right("a generator is read once", "g = solution.f()\nassert list(g) == [1, 2, 3] and list(g) == []", GENERATOR),
    right("a generator without end", "import itertools\nassert list(itertools.islice(solution.f(), 4)) == [6, 28, 496, 8128]", "def f():\n    n = 2\n    while True:\n        if sum(d for d in range(1, n // 2 + 1) if n % d == 0) == n: yield n\n        if n == 8128:\n            while True: pass\n        n = {6: 28, 28: 496, 496: 8128}.get(n, n + 1)"),
    right("send to a generator", "g = solution.f()\nassert next(g) == 0 and g.send(5) == 5", "def f():\n    x = 0\n    while True: x = yield x"),
    right("list of a map", "assert list(solution.f([1, 2])) == [2, 3]", "def f(xs): return map(lambda x: x + 1, xs)"),
    right("list of a filter", "assert list(solution.f([1, 2, 3])) == [1, 3]", "def f(xs): return filter(lambda x: x % 2, xs)"),
    right("list of a zip", "assert list(solution.f([1, 2], 'ab')) == [(1, 'a'), (2, 'b')]", "f = zip"),
    right("dict of a zip", "assert dict(solution.f('ab', [1, 2])) == {'a': 1, 'b': 2}", "f = zip"),
    right("list of reversed", "assert list(solution.f([1, 2])) == [2, 1]", "f = reversed"),
    right("combinations", "assert list(solution.f([1, 2, 3])) == [(1, 2), (1, 3), (2, 3)]", "import itertools\ndef f(xs): return itertools.combinations(xs, 2)"),
    right("keys", "k = solution.f()\nassert sorted(k) == ['a', 'b'] and k == {'a', 'b'} and list(k) == ['b', 'a']", "def f(): return {'b': 1, 'a': 2}.keys()"),
    right("values", "assert sum(solution.f()) == 3 and list(solution.f()) == [1, 2]", "def f(): return {'b': 1, 'a': 2}.values()"),
    right("items", "assert dict(solution.f()) == {'b': 1}", "def f(): return {'b': 1}.items()"),
    right("a range", "assert solution.f() == range(3) and list(solution.f()) == [0, 1, 2]", "def f(): return range(3)"),
    right("a deque", "import collections\nd = solution.f()\nassert d == collections.deque([1, 2]) and d.popleft() == 1", "import collections\ndef f(): return collections.deque([1, 2], maxlen=2)"),
    unit("a generator where only data may be returned", "AC", "assert list(solution.f()) == [1, 2, 3]", GENERATOR, objects=False),
    right("two hundred items", "assert list(solution.f()) == list(range(200))", "def f(): yield from range(200)"),
    right("a generator of objects", "assert [n.value for n in solution.f()] == [1, 2]", NODE + "def f():\n    yield Node(1)\n    yield Node(2)"),
)  # fmt: skip

VALUES = (
    right("a tuple", "assert solution.f() == (1, [2, {3}])", "def f(): return (1, [2, {3}])"),
    right("a named tuple", "assert solution.f() == (1, 2)", "import typing\nclass P(typing.NamedTuple):\n    x: int\n    y: int\ndef f(): return P(1, 2)"),
    right("a counter", "c = solution.f('aab')\nassert c == {'a': 2, 'b': 1} and c['a'] == 2 and 'c' not in c", "import collections\nf = collections.Counter"),
    right("a defaultdict", "assert solution.f() == {'a': [1]}", "import collections\ndef f():\n    d = collections.defaultdict(list)\n    d['a'].append(1)\n    return d"),
    right("a copy that the test changes", "d = solution.f()\nd['b'] = 2\ndel d['a']\nassert d == {'b': 2}", "def f(): return {'a': 1}"),
    right("a list that the test sorts", "x = solution.f()\nx.sort()\nx.append(9)\nassert x == [1, 2, 9] and x[-1:] == [9]", "def f(): return [2, 1]"),
    right("keys of any kind", "assert solution.f() == {1: 'a', (2, 3): None, None: True}", "def f(): return {1: 'a', (2, 3): None, None: True}"),
    right("sets", "assert solution.f() == {1, 2} and solution.f() | {3} == {1, 2, 3}", "def f(): return frozenset([1, 2])"),
    right("bytes", "assert solution.f() == b'ab' and solution.f()[0] == 97", "def f(): return bytearray(b'ab')"),
    right("complex", "assert solution.f() == 1 + 2j and abs(solution.f()) > 2", "def f(): return complex(1, 2)"),
    right("a fraction", "from fractions import Fraction\nassert solution.f() == Fraction(1, 3) and solution.f() * 3 == 1", "import fractions\ndef f(): return fractions.Fraction(1, 3)"),
    right("a decimal", "from decimal import Decimal\nassert solution.f() == Decimal('0.10') and str(solution.f()) == '0.10'", "import decimal\ndef f(): return decimal.Decimal('0.10')"),
    right("infinity and NaN", "import math\na, b = solution.f()\nassert a == math.inf and math.isnan(b)", "def f(): return float('inf'), float('nan')"),
    right("isclose", "import math\nassert math.isclose(solution.f(), 0.3) and abs(solution.f() - 0.3) < 1e-9", "def f(): return 0.1 + 0.2"),
    right("large integers", "assert solution.f() == 2 ** 200", "def f(): return 2 ** 200"),
    right("booleans", "assert solution.f() is True and not solution.g()", "def f(): return True\ndef g(): return False"),
    right("None", "assert solution.f() is None", "def f(): pass"),
    right("an integer of an enum", "assert solution.Color.RED == 1 and solution.f() == solution.Color.RED", "import enum\nclass Color(enum.IntEnum): RED = 1\ndef f(): return Color.RED"),
    right("members of an enum", "assert solution.f() is solution.Color.RED and solution.f() != solution.Color.BLUE and solution.f().name == 'RED'", "import enum\nclass Color(enum.Enum):\n    RED = 'r'\n    BLUE = 'b'\ndef f(): return Color.RED"),
    right("a constant", "assert solution.LIMIT == 10 and solution.NAMES == ['a']", "LIMIT, NAMES = 10, ['a']"),
    right("a constant of a class", "assert solution.Box.SIDES == 6", "class Box: SIDES = 6"),
    right("text subclasses", "assert solution.f() == 'ab' and solution.f().upper() == 'AB'", "class T(str): pass\ndef f(): return T('ab')"),
)  # fmt: skip

ARGUMENTS = (
    right("a generator for an argument", "assert solution.f(n * n for n in range(4)) == 14", "def f(xs): return sum(xs)"),
    right("an iterator for an argument", "assert solution.f(iter([1, 2])) == 1", "def f(xs): return next(xs)"),
    right("a range for an argument", "assert solution.f(range(0, 10, 5)) == (2, [0, 5])", "def f(xs): return len(xs), list(xs)"),
    right("sets and tuples for arguments", "assert solution.f({1}, (2,), {'k': {3}}) == 'settupleset'", "def f(a, b, c): return type(a).__name__ + type(b).__name__ + type(c['k']).__name__"),
    right("keywords and defaults", "assert solution.f(1, c=3) == [1, 2, 3]", "def f(a, b=2, *, c): return [a, b, c]"),
    right("objects passed back", "a, b = solution.Node(1), solution.Node(2)\nsolution.link(a, b)\nassert a.next is b and a.next.value == 2", NODE + "def link(a, b): a.next = b"),
    right("objects in a list passed back", "nodes = [solution.Node(n) for n in (1, 2)]\nassert solution.total(nodes) == 3", NODE + "def total(nodes): return sum(n.value for n in nodes)"),
    right("an argument that is changed stays", "x = [2, 1]\nassert solution.f(x) == [1, 2] and x == [2, 1]", "def f(x): return sorted(x)"),
    right("985 levels of recursion", "assert solution.f(985) == 985", "def f(n): return 0 if n == 0 else 1 + f(n - 1)"),
)  # fmt: skip

OBJECTS = (
    right("a stack", "s = solution.Stack()\nassert len(s) == 0\ns.push(1)\ns.push(2)\nassert len(s) == 2 and list(s) == [1, 2] and s.pop() == 2 and len(s) == 1", STACK),
    right("operators see the object after each call", "s = solution.Stack()\nfor n in range(5):\n    assert n not in s\n    s.push(n)\n    assert n in s and len(s) == n + 1", STACK),
    right("calls in a chain", "assert solution.Stack().push(1).push(2).pop() == 2", STACK),
    right("str and repr", "s = solution.Stack().push(1)\nassert str(s) == 'Stack[1]' and repr(s) == '<[1]>' and f'{s}' == 'Stack[1]'", STACK),
    right("indices and slices", "s = solution.Stack().push(1).push(2)\nassert s[0] == 1 and s[-1] == 2 and s[:1] == [1] and list(reversed(s)) == [2, 1]", STACK),
    right("a custom mapping", "m = solution.M()\nassert dict(m) == {'a': 1} and m['a'] == 1 and 'b' not in m and len(m) == 1", "class M:\n    def keys(self): return ['a']\n    def __getitem__(self, key): return {'a': 1}[key]\n    def __iter__(self): return iter(['a'])"),
    right("only a length", "assert len(solution.Q()) == 4", "class Q:\n    def __len__(self): return 4"),
    right("attributes", "n = solution.Node(5)\nassert n.value == 5 and n.next is None", NODE),
    right("attributes that the test sets", "n = solution.Node(1)\nn.value = 7\nn.next = solution.Node(2)\nassert n.value == 7 and n.next.value == 2", NODE),
    right("a property", "t = solution.T()\nt.celsius = 100\nassert t.fahrenheit == 212", "class T:\n    celsius = 0\n    @property\n    def fahrenheit(self): return self.celsius * 9 / 5 + 32"),
    right("a linked list is walked", "node, seen = solution.build([1, 2, 3]), []\nwhile node is not None:\n    seen.append(node.value)\n    node = node.next\nassert seen == [1, 2, 3]", NODE + "def build(values):\n    head = None\n    for v in reversed(values): head = Node(v, head)\n    return head"),
    right("a cycle is recognized", "n = solution.Node(1)\nn.next = n\nassert n.next is n and n.next == n", NODE),
    right("a singleton", "assert solution.get() is solution.get() and len({solution.get(), solution.get()}) == 1", "class S: pass\ns = S()\ndef get(): return s"),
    right("a class method makes one", "p = solution.P.origin()\nassert (p.x, p.y) == (0, 0)", "class P:\n    def __init__(self, x, y): self.x, self.y = x, y\n    @classmethod\n    def origin(cls): return cls(0, 0)"),
    right("a static method", "assert solution.P.add(1, 2) == 3", "class P:\n    def __init__(self, x): pass\n    @staticmethod\n    def add(a, b): return a + b"),
    right("a closure", "count = solution.counter()\nassert (count(), count()) == (1, 2)", "def counter():\n    n = 0\n    def count():\n        nonlocal n\n        n += 1\n        return n\n    return count"),
    right("a decorated function with attributes", "solution.f(1)\nsolution.f(1)\nassert solution.f.calls == 2", "def f(x): f.calls += 1\nf.calls = 0"),
    right("a cache", "solution.f(3)\nsolution.f(3)\nassert solution.f.cache_info()[0] == 1", "import functools\n@functools.lru_cache\ndef f(n): return n"),
    right("hasattr and getattr", "s = solution.Stack()\nassert hasattr(s, 'push') and not hasattr(s, 'peek') and getattr(s, 'peek', 4) == 4 and not hasattr(solution, 'nothing')", STACK),
    right("inheritance", "assert [a.sound() for a in (solution.Dog(), solution.Cat())] == ['wuff', 'miau']", "class A: pass\nclass Dog(A):\n    def sound(self): return 'wuff'\nclass Cat(A):\n    def sound(self): return 'miau'"),
    right("a bound method is kept", "push = solution.Stack().push\nassert push(1).pop() == 1", STACK),
)  # fmt: skip

EXCEPTIONS = (
    right("an exception of the solution", "import unittest\nwith unittest.TestCase().assertRaises(solution.Low): solution.f(-1)", ERRORS),
    right("except by its class", "try: solution.f(-1)\nexcept solution.Low as error: assert str(error) == '-1 is low'\nelse: assert False", ERRORS),
    right("except by its base", "try: solution.f(-1)\nexcept solution.Base: pass\nelse: assert False", ERRORS),
    right("except by its builtin base", "try: solution.f(-1)\nexcept ValueError as error: assert isinstance(error, solution.Base) and type(error).__name__ == 'Low'\nelse: assert False", ERRORS),
    right("a builtin exception", "import unittest\nunittest.TestCase().assertRaisesRegex(KeyError, 'k', solution.f)", "def f(): return {}['k']"),
    right("a subclass of Exception", "import unittest\nunittest.TestCase().assertRaises(solution.Stop, solution.f)", "class Stop(Exception): pass\ndef f(): raise Stop(1, 2)"),
    right("an exception in a generator", "g = solution.f()\nassert next(g) == 1\ntry: next(g)\nexcept ZeroDivisionError: pass\nelse: assert False", "def f():\n    yield 1\n    1 / 0"),
    right("prints as it works", "assert solution.f() == 1", "def f():\n    print('debug')\n    return 1"),
)  # fmt: skip

STAR = "from solution import *\n"
SQUARES = "import math\nLIMIT = 3\ndef square(x): return x * x\ndef _hidden(): return 1\n"

IMPORTS = (
    whole("star import", "AC", STAR + "def test_it(): assert square(3) == 9 and LIMIT == 3", SQUARES),
    whole("star import with __all__", "AC", STAR + "def test_it(): assert _twice(3) == 6", "__all__ = ['_twice']\ndef _twice(x): return 2 * x"),
    whole("star import beside names of the test", "AC", "import math\n" + STAR + "def test_it(): assert math.isclose(square(3), 9)", SQUARES),
    whole("star import of a class and an exception", "AC", STAR + "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n        self.assertEqual(Box(1).x, 1)\n        with self.assertRaises(Full): Box(1).fill()", "class Full(Exception): pass\nclass Box:\n    def __init__(self, x): self.x = x\n    def fill(self): raise Full"),
    whole("asserts at module level", "AC", STAR + "assert square(2) == 4\nassert square(3) == 9", SQUARES),
    whole("asserts at module level after an import by name", "AC", "from solution import square\nassert square(2) == 4, 'two'", SQUARES),
    whole("a check that is called at module level", "AC", "from solution import square\nMETADATA = {}\ndef check(candidate):\n    assert candidate(2) == 4\ncheck(square)", SQUARES),
    whole("a loop of asserts at module level", "AC", STAR + "for n in range(3): assert square(n) == n ** 2", SQUARES),
    whole("a test that its decorator skips is not one of the tests", "AC", "import unittest, solution\nclass T(unittest.TestCase):\n    @unittest.skip('later')\n    def test_a(self): assert solution.square(1) == 2\n    def test_b(self): assert solution.square(1) == 1", SQUARES),
)  # fmt: skip

ARGUMENTS_OF_EXCEPTIONS = (
    right("the key of a KeyError", "try: solution.f()\nexcept KeyError as error: assert error.args == ('k',) and str(error) == repr('k')\nelse: assert False", "def f(): return {}['k']"),
    right("no arguments", "try: solution.f()\nexcept ValueError as error: assert error.args == ()\nelse: assert False", "def f(): raise ValueError"),
    right("several arguments", "try: solution.f()\nexcept ValueError as error: assert error.args == ('a', [1, 2])\nelse: assert False", "def f(): raise ValueError('a', [1, 2])"),
    right("a UnicodeDecodeError", "try: solution.f(b'\\xff')\nexcept UnicodeDecodeError as error: assert (error.start, error.reason, error.object) == (0, 'invalid start byte', b'\\xff')\nelse: assert False", "def f(data): return data.decode()"),
    right("an ExceptionGroup", "try: solution.f()\nexcept* ValueError as group: assert [e.args for e in group.exceptions] == [(1,)]\nexcept* KeyError as group: assert group.exceptions[0].args == ('k',)\nelse: assert False", "def f(): raise ExceptionGroup('both', [ValueError(1), KeyError('k')])"),
    right("a JSONDecodeError", "import json, unittest\nwith unittest.TestCase().assertRaises(json.JSONDecodeError) as caught: solution.f('[1,')\nassert caught.exception.pos == 3 and 'line 1 column 4' in str(caught.exception)", "import json\nf = json.loads"),
    right("decimal.InvalidOperation", "import decimal, unittest\nunittest.TestCase().assertRaises(decimal.InvalidOperation, solution.f, 'x')", "import decimal\ndef f(text): return decimal.Decimal(text)"),
    right("the number of an OSError", "import errno\ntry: solution.f()\nexcept FileNotFoundError as error: assert error.errno == errno.ENOENT and error.filename == 'none'\nelse: assert False", "def f(): open('none')"),
    right("an attribute of an exception", "try: solution.f()\nexcept solution.E as error: assert error.code == 7 and error.kind == 'k' and error.twice == 14 and str(error) == 'E7'\nelse: assert False", "class E(Exception):\n    kind = 'k'\n    def __init__(self, code): self.code = code\n    twice = property(lambda self: 2 * self.code)\n    def __str__(self): return f'E{self.code}'\ndef f(): raise E(7)"),
    right("the value of StopIteration", "g = solution.f()\nassert next(g) == 1\ntry: next(g)\nexcept StopIteration as error: assert error.value == 5\nelse: assert False", "def f():\n    yield 1\n    return 5"),
    right("SystemExit", "import unittest\nwith unittest.TestCase().assertRaises(SystemExit) as caught: solution.f()\nassert caught.exception.code == 2", "import sys\ndef f(): sys.exit(2)"),
    right("the cause of an exception", "try: solution.f()\nexcept RuntimeError as error: assert isinstance(error.__cause__, KeyError) and error.__cause__.args == ('k',)\nelse: assert False", "def f():\n    try: {}['k']\n    except KeyError as error: raise RuntimeError('no') from error"),
    right("an object in an exception", "try: solution.f()\nexcept solution.E as error: assert error.node.value == 4\nelse: assert False", NODE + "class E(Exception):\n    def __init__(self, node):\n        super().__init__(node)\n        self.node = node\ndef f(): raise E(Node(4))"),
)  # fmt: skip

LARGE_AND_DATED = (
    right("integers of more than 4300 digits", "assert solution.f(5000) == 10 ** 5000 and solution.f(-1 * -5000) % 7 == 10 ** 5000 % 7", "def f(n): return 10 ** n"),
    right("a large integer for an argument", "assert solution.f(10 ** 5000) == 5001", "def f(n):\n    k = 0\n    while n: n, k = n // 10, k + 1\n    return k"),
    right("an argument of 100 kB", "assert solution.f(list(range(20_000))) == 199990000 and solution.f([1]) == 1", "f = sum"),
    right("an attribute of 100 kB", "n = solution.Node(1)\nn.value = 'x' * 100_000\nassert n.size() == 100_000", NODE + "    def size(self): return len(self.value)"),
    right("dates", "import datetime\nassert solution.f(datetime.date(2024, 2, 28)) == datetime.date(2024, 2, 29)", "import datetime\ndef f(day): return day + datetime.timedelta(days=1)"),
    right("times", "import datetime as d\na, b, c, e = solution.f()\nassert a == d.datetime(2024, 1, 2, 3, 4, 5, 6, d.timezone.utc) and b == d.time(1, 2) and c == d.timedelta(-1, 5, 7) and e == d.datetime(2024, 1, 1)", "import datetime as d\ndef f(): return d.datetime(2024, 1, 2, 3, 4, 5, 6, d.timezone.utc), d.time(1, 2), d.timedelta(-1, 5, 7), d.datetime(2024, 1, 1)"),
    right("the name of a function", "assert solution.f.__name__ == 'f' and solution.f.__doc__ == 'Doc.'", "def f():\n    'Doc.'"),
    right("an attribute of a function", "solution.f()\nsolution.f()\nassert solution.f.calls == 2", "def f(): f.calls += 1\nf.calls = 0"),
    unit("a call where only data may be returned", "AC", "assert solution.f() == 1 and solution.LIMIT == 2 and next(solution.g()) == 3", "LIMIT = 2\ndef f(): return 1\ndef g(): yield 3", objects=False),
    right("any over results", "assert any(map(solution.f, [1, 2])) and not all(map(solution.f, [0, 1]))", "f = bool"),
)  # fmt: skip

RIGHT = (
    *ITERATORS, *VALUES, *ARGUMENTS, *OBJECTS, *EXCEPTIONS, *IMPORTS, *ARGUMENTS_OF_EXCEPTIONS, *LARGE_AND_DATED,
)  # fmt: skip

"""Hidden tests of unusual form as in benchmarks of functions and classes, with right and wrong solutions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Story:
    """The source of hidden tests, and solutions."""

    name: str
    style: str
    hidden: str
    right: tuple[str, ...]
    wrong: tuple[str, ...]


_BANK = """
class InsufficientFunds(Exception):
    def __init__(self, need, have):
        super().__init__(f"need {need}, have {have}")
        self.need, self.have = need, have
class Account:
    def __init__(self, balance=0): self.balance = balance
    def deposit(self, amount):
        if amount <= 0: raise ValueError("amount too small")
        self.balance += amount
    def withdraw(self, amount):
        if amount > self.balance: raise InsufficientFunds(amount, self.balance)
        self.balance -= amount
"""

STORIES = (
    Story(
        "zeros of a polynomial", "humaneval",
        "from solution import poly, find_zero\nimport math, random, copy\ndef check(candidate):\n    rng = random.Random(42)\n    for _ in range(5):\n        roots = [rng.randint(-5, 5) for _ in range(3)]\n        c = [1]\n        for r in roots:\n            c = [(c[i - 1] if i else 0) - r * (c[i] if i < len(c) else 0) for i in range(len(c) + 1)]\n        assert math.fabs(poly(c, candidate(copy.deepcopy(c)))) < 1e-4\ncheck(find_zero)",
        ("def poly(xs, x): return sum(c * x ** i for i, c in enumerate(xs))\ndef find_zero(xs):\n    lo, hi = -1.0, 1.0\n    while poly(xs, lo) * poly(xs, hi) > 0: lo, hi = lo * 2, hi * 2\n    for _ in range(200):\n        mid = (lo + hi) / 2\n        if poly(xs, lo) * poly(xs, mid) <= 0: hi = mid\n        else: lo = mid\n    return lo",),
        ("def poly(xs, x): return sum(c * x ** i for i, c in enumerate(xs))\ndef find_zero(xs): return 0.37",),
    ),
    Story(
        "decoding of what the test encodes", "humaneval",
        "from random import Random\nimport string\nfrom solution import decode\ndef encode(s): return ''.join(chr((ord(c) - 97 + 5) % 26 + 97) for c in s)\ndef check(candidate):\n    rng = Random(1)\n    for _ in range(20):\n        text = ''.join(rng.choice(string.ascii_lowercase) for _ in range(rng.randint(10, 20)))\n        assert candidate(encode(text)) == text\ncheck(decode)",
        ("def decode(s): return ''.join(chr((ord(c) - 97 - 5) % 26 + 97) for c in s)",),
        ("def decode(s): return ''.join(chr(ord(c) - 5) for c in s)", "def decode(s): return s"),
    ),
    Story(
        "tuples and sets", "humaneval",
        "from solution import f\ndef check(candidate):\n    assert candidate([1, 2, 2]) == (3, {1, 2})\n    assert tuple(candidate([])) == (0, set())\ncheck(f)",
        ("def f(xs): return len(xs), set(xs)", "def f(xs):\n    return (len(xs), frozenset(xs))"),
        ("def f(xs): return [len(xs), set(xs)]", "def f(xs): return len(set(xs)), set(xs)"),
    ),
    Story(
        "floats near each other", "humaneval",
        "from solution import f\nimport math\ndef check(candidate):\n    assert abs(candidate(3.5) - 0.5) < 1e-6\n    assert abs(candidate(1.33) - 0.33) < 1e-6\n    assert math.isclose(candidate(123.456), 0.456, rel_tol=1e-9)\ncheck(f)",
        ("def f(x): return x % 1.0", "import math\ndef f(x): return math.modf(x)[0]"),
        ("def f(x): return int(x)", "def f(x): return float('nan')", "def f(x): return str(x % 1.0)"),
    ),
    Story(
        "a name that is an attribute of the module", "humaneval",
        "import solution\ndef check(candidate):\n    assert candidate(0) is None\n    assert candidate('x') == 'x'\n    assert True, 'This prints if this assert fails'\ncheck(getattr(solution, 'f'))",
        ("def f(x): return x or None",), ("def f(x): return x", "def g(x): return x or None"),
    ),
    Story(
        "sorted results in any order", "humaneval",
        "from solution import f\ndef check(candidate):\n    assert sorted(candidate(['a', 'b'])) == sorted(['ab', 'ba'])\n    assert set(map(tuple, [candidate(['x'])])) == {('x',)}\ncheck(f)",
        ("import itertools\ndef f(xs): return list(map(''.join, itertools.permutations(xs)))", "def f(xs): return [x + y for x in xs for y in xs if x != y] or xs"),
        ("def f(xs): return [''.join(xs)] * len(xs)", "def f(xs): return None"),
    ),
    Story(
        "a generator", "humaneval",
        "from solution import f\ndef check(candidate):\n    assert list(candidate(3)) == [0, 1, 4]\n    assert next(iter(candidate(1))) == 0\n    assert sum(candidate(4)) == 14\ncheck(f)",
        ("def f(n):\n    for i in range(n): yield i * i", "def f(n): return (i * i for i in range(n))", "def f(n): return [i ** 2 for i in range(n)]", "f = lambda n: map(lambda i: i * i, range(n))"),
        ("def f(n):\n    for i in range(n): yield i", "def f(n): yield from ()"),
    ),
    Story(
        "asserts with messages and helpers", "mbpp",
        "from solution import *\ndef close(a, b): return abs(a - b) < 1e-3\nassert close(area(2), 12.566), area(2)\nassert close(area(0), 0)\nassert not close(area(1), 1)",
        ("import math\ndef area(r): return math.pi * r * r", "from math import pi\narea = lambda r: pi * r ** 2"),
        ("def area(r): return r * r", "def area(r): return 3 * r * r"),
    ),
    Story(
        "a name in capitals and numbers", "mbpp", "from solution import *\nassert find_Nth_2(5) == 10\nassert find_Nth_2(0) == 0",
        ("def find_Nth_2(n): return 2 * n", "def helper(n): return n\ndef find_Nth_2(n): return helper(n) + helper(n)"),
        ("def find_Nth_2(n): return n * n", "def find_nth_2(n): return 2 * n"),
    ),
    Story(
        "helpers and constants are imported, too", "mbpp", "from solution import *\nassert scale(2) == 2 * FACTOR == 6\nassert isinstance(NAMES, list) and NAMES[0] == 'a'",
        ("FACTOR, NAMES = 3, ['a']\ndef scale(x): return FACTOR * x",), ("FACTOR, NAMES = 4, ['a']\ndef scale(x): return 3 * x", "FACTOR, NAMES = 3, 'a'\ndef scale(x): return FACTOR * x"),
    ),
    Story(
        "tuples of tuples", "mbpp", "from solution import *\nassert pair_sum(((1, 2), (3, 4))) == (3, 7)\nassert pair_sum([(0, 0)]) == (0,)",
        ("def pair_sum(t): return tuple(map(sum, t))", "def pair_sum(t):\n    return tuple(a + b for a, b in t)"), ("def pair_sum(t): return [a + b for a, b in t]", "def pair_sum(t): return sum(map(sum, t))"),
    ),
    Story(
        "dictionaries with keys of any kind", "mbpp", "from solution import *\nassert group([1, 2, 3]) == {True: [1, 3], False: [2]}\nassert group([]) == {}",
        ("from collections import defaultdict\ndef group(xs):\n    d = defaultdict(list)\n    for x in xs: d[x % 2 == 1].append(x)\n    return d", "def group(xs): return {k: [x for x in xs if x % 2 == k] for k in {x % 2 for x in xs}}"),
        ("def group(xs): return {'odd': [x for x in xs if x % 2], 'even': [x for x in xs if x % 2 == 0]}",),
    ),
    Story(
        "sets of results", "mbpp", "from solution import *\nassert set(common((3, 4, 5), (5, 7, 4))) == set((4, 5))\nassert common((1,), (2,)) == set() or common((1,), (2,)) == ()",
        ("def common(a, b): return tuple(set(a) & set(b))", "def common(a, b): return {x for x in a if x in b}"), ("def common(a, b): return a + b", "def common(a, b): return ()"),
    ),
    Story(
        "large numbers", "mbpp", "from solution import *\nassert len(str(power(10, 500))) == 501\nassert power(2, 20000) == 2 ** 20000\nassert power(7, 6000) % 1000 == 1",
        ("def power(a, b): return a ** b",), ("def power(a, b): return pow(a, b, 10 ** 9 + 7)", "def power(a, b): return float(a) ** b"),
    ),
    Story(
        "complex numbers", "mbpp", "from solution import *\nimport cmath\nassert convert(1) == (1.0, 0.0)\nassert cmath.isclose(complex(*convert(4)), 4)",
        ("import cmath\ndef convert(n): return cmath.polar(n)", "def convert(n): return (float(n), 0.0)"), ("def convert(n): return (n, 1)",),
    ),
    Story(
        "a regular expression with a text", "mbpp", "from solution import *\nassert text_match('aab_cbbbc') == 'Found a match!'\nassert text_match('Aab') == 'Not matched!'",
        ("import re\ndef text_match(t):\n    if re.search('^[a-z]+_[a-z]+$', t): return 'Found a match!'\n    else: return ('Not matched!')",), ("import re\ndef text_match(t): return re.search('^[a-z]+_[a-z]+$', t)", "def text_match(t): return 'Found a match!'"),
    ),
    Story(
        "a class of an account", "unittest",
        "import unittest\nfrom solution import Account, InsufficientFunds\nclass TestAccount(unittest.TestCase):\n    def setUp(self): self.account = Account(10)\n    def test_all(self):\n        self.account.deposit(5)\n        self.assertEqual(self.account.balance, 15)\n        with self.assertRaises(ValueError) as caught: self.account.deposit(0)\n        self.assertEqual(str(caught.exception), 'amount too small')\n        with self.assertRaises(InsufficientFunds) as caught: self.account.withdraw(99)\n        self.assertEqual((caught.exception.need, caught.exception.have), (99, 15))\n        self.assertEqual(caught.exception.args, ('need 99, have 15',))\n        self.assertEqual(self.account.balance, 15)",
        (_BANK,), (_BANK.replace("raise ValueError", "print"), _BANK.replace("self.need, self.have = need, have", "self.need, self.have = have, need"), _BANK.replace("f\"need {need}, have {have}\"", "need")),
    ),
    Story(
        "assertions of unittest", "unittest",
        "import unittest, solution\nclass T(unittest.TestCase):\n    def test_all(self):\n        self.assertAlmostEqual(solution.f(1)['mean'], 0.333333, places=5)\n        self.assertIn('mean', solution.f(2))\n        self.assertCountEqual(solution.f(2), ['mean', 'n'])\n        self.assertDictEqual({**solution.f(3), 'mean': 0}, {'mean': 0, 'n': 3})\n        self.assertIsInstance(solution.f(1)['n'], int)\n        self.assertGreater(solution.f(4)['mean'], 1)\n        self.assertRegex(str(solution.f(1)), r'n.: 1')\n        self.assertIsNone(solution.f(0))",
        ("def f(n): return {'mean': n / 3, 'n': n} if n else None",), ("def f(n): return {'mean': n / 2, 'n': n} if n else None", "def f(n): return {'mean': n / 3, 'n': n}", "def f(n): return {'mean': n / 3, 'n': n, 'x': 1} if n else None"),
    ),
    Story(
        "the key of a KeyError", "unittest", "import unittest\nfrom solution import get\nclass T(unittest.TestCase):\n    def test_it(self):\n        with self.assertRaises(KeyError) as caught: get({}, 'k')\n        self.assertEqual(caught.exception.args[0], 'k')\n        self.assertEqual(get({'k': 1}, 'k'), 1)",
        ("def get(d, k): return d[k]", "def get(d, k):\n    if k not in d: raise KeyError(k)\n    return d[k]"), ("def get(d, k): return d.get(k)", "def get(d, k):\n    if k not in d: raise KeyError('no key')\n    return d[k]"),
    ),
    Story(
        "errors of JSON", "unittest", "import json, unittest\nfrom solution import parse\nclass T(unittest.TestCase):\n    def test_it(self):\n        self.assertEqual(parse('{\"a\": [1, null]}'), {'a': [1, None]})\n        with self.assertRaises(json.JSONDecodeError) as caught: parse('{')\n        self.assertEqual(caught.exception.lineno, 1)",
        ("import json\ndef parse(t): return json.loads(t)",), ("import json\ndef parse(t):\n    try: return json.loads(t)\n    except ValueError: return None", "import json\ndef parse(t):\n    try: return json.loads(t)\n    except ValueError: raise ValueError('bad')"),
    ),
    Story(
        "a bad number", "unittest", "import decimal, unittest\nfrom decimal import Decimal\nfrom solution import money\ndef test_it():\n    assert money('1.10') + money('2.20') == Decimal('3.30')\n    try: money('x')\n    except decimal.InvalidOperation: pass\n    else: assert False",
        ("from decimal import Decimal\ndef money(t): return Decimal(t)",), ("def money(t): return float(t)", "from decimal import Decimal\ndef money(t): return Decimal(0)"),
    ),
    Story(
        "exit of a command", "unittest", "import unittest\nfrom solution import main\nclass T(unittest.TestCase):\n    def test_it(self):\n        with self.assertRaises(SystemExit) as caught: main(['--bad'])\n        self.assertEqual(caught.exception.code, 2)\n        self.assertEqual(main([]), 0)",
        ("import sys\ndef main(argv):\n    if argv: sys.exit(2)\n    return 0", "import argparse\ndef main(argv):\n    argparse.ArgumentParser().parse_args(argv)\n    return 0"), ("import sys\ndef main(argv):\n    if argv: sys.exit(1)\n    return 0", "def main(argv): return 2 if argv else 0", "import sys\ndef main(argv): sys.exit(2)"),
    ),
    Story(
        "dates", "unittest", "import datetime as dt\nfrom solution import next_monday, age\ndef test_it():\n    assert next_monday(dt.date(2024, 2, 28)) == dt.date(2024, 3, 4)\n    assert next_monday(dt.date(2024, 3, 4)) == dt.date(2024, 3, 11)\n    assert age(dt.datetime(2024, 1, 1), dt.datetime(2024, 1, 2, 12)) == dt.timedelta(days=1, hours=12)",
        ("import datetime\ndef next_monday(d): return d + datetime.timedelta(7 - d.weekday())\ndef age(a, b): return b - a",), ("import datetime\ndef next_monday(d): return d + datetime.timedelta(7)\ndef age(a, b): return b - a", "import datetime\ndef next_monday(d): return str(d + datetime.timedelta(7 - d.weekday()))\ndef age(a, b): return b - a"),
    ),
    Story(
        "a stack", "unittest", "from solution import Stack\nclass TestStack:\n    def setup_method(self): self.s = Stack()\n    def test_it(self):\n        assert self.s.is_empty() and len(self.s) == 0\n        self.s.push(1)\n        self.s.push([2])\n        assert self.s.peek() == [2] and len(self.s) == 2\n        assert self.s.pop() == [2] and self.s.pop() == 1\n        try: self.s.pop()\n        except IndexError as error: assert 'empty' in str(error)\n        else: raise AssertionError('no error')",
        ("class Stack:\n    def __init__(self): self.xs = []\n    def push(self, x): self.xs.append(x)\n    def peek(self): return self.xs[-1]\n    def is_empty(self): return not self.xs\n    def __len__(self): return len(self.xs)\n    def pop(self):\n        if not self.xs: raise IndexError('pop from an empty stack')\n        return self.xs.pop()",),
        ("class Stack:\n    def __init__(self): self.xs = []\n    def push(self, x): self.xs.append(x)\n    def peek(self): return self.xs[0]\n    def is_empty(self): return not self.xs\n    def __len__(self): return len(self.xs)\n    def pop(self): return self.xs.pop()", "class Stack:\n    def __len__(self): return 0"),
    ),
    Story(
        "a linked list", "unittest", "from solution import Node, reverse\ndef test_it():\n    head = Node(1, Node(2, Node(3)))\n    node, seen = reverse(head), []\n    while node is not None:\n        seen.append(node.value)\n        node = node.next\n    assert seen == [3, 2, 1]\n    assert reverse(None) is None",
        ("class Node:\n    def __init__(self, value, next=None): self.value, self.next = value, next\ndef reverse(n):\n    last = None\n    while n: n.next, last, n = last, n, n.next\n    return last", "from dataclasses import dataclass\n@dataclass\nclass Node:\n    value: int\n    next: 'Node' = None\ndef reverse(n, last=None): return reverse(n.next, Node(n.value, last)) if n else last"),
        ("class Node:\n    def __init__(self, value, next=None): self.value, self.next = value, next\ndef reverse(n): return n", "class Node:\n    def __init__(self, value, next=None): self.value, self.next = value, next\ndef reverse(n): return None"),
    ),
    Story(
        "members of an enum", "unittest", "from solution import Color, mix\ndef test_it():\n    assert mix('r') is Color.RED and mix('b') != Color.RED\n    assert Color.RED.value == 'r' and mix('b').name == 'BLUE'",
        ("import enum\nclass Color(enum.Enum):\n    RED = 'r'\n    BLUE = 'b'\ndef mix(c): return Color(c)",), ("import enum\nclass Color(enum.Enum):\n    RED = 'r'\n    BLUE = 'b'\ndef mix(c): return Color.RED",),
    ),
    Story(
        "groups of exceptions", "unittest", "from solution import run\ndef test_it():\n    seen = []\n    try: run([1, 0, 'x'])\n    except* ZeroDivisionError as group: seen += group.exceptions\n    except* TypeError as group: seen += group.exceptions\n    assert len(seen) == 2 and run([1]) == [1.0]",
        ("def run(xs):\n    out, errors = [], []\n    for x in xs:\n        try: out.append(1 / x)\n        except Exception as e: errors.append(e)\n    if errors: raise ExceptionGroup('failed', errors)\n    return out",), ("def run(xs): return [1 / x for x in xs]", "def run(xs): return [1.0]"),
    ),
    Story(
        "coded text", "unittest", "from solution import read\ndef test_it():\n    assert read(b'h\\xc3\\xa9') == 'h\\u00e9'\n    try: read(b'\\xff')\n    except UnicodeDecodeError as error: assert error.start == 0 and error.encoding.startswith('utf')\n    else: assert False",
        ("def read(data): return data.decode('utf-8')", "def read(data): return str(data, 'utf8')"), ("def read(data): return data.decode('latin-1')", "def read(data): return data.decode('utf-8', 'replace')"),
    ),
    Story(
        "loops over results", "unittest", "from solution import is_prime\nprimes, others = [2, 3, 5, 97], [1, 4, 91]\ndef test_it():\n    assert all(map(is_prime, primes))\n    assert not any(map(is_prime, others))\n    assert [n for n in range(20) if is_prime(n)] == [2, 3, 5, 7, 11, 13, 17, 19]",
        ("def is_prime(n): return n > 1 and all(n % d for d in range(2, int(n ** 0.5) + 1))", "import re\ndef is_prime(n): return not re.fullmatch(r'1?|(11+?)\\1+', '1' * n)"), ("def is_prime(n): return n % 2 == 1", "def is_prime(n): raise ValueError(n)", "def is_prime(n): return True"),
    ),
    Story(
        "a file that is missing", "unittest", "import errno\nfrom solution import load\ndef test_it():\n    try: load('/no/such/file')\n    except OSError as error: assert error.errno == errno.ENOENT\n    else: assert False",
        ("def load(p): return open(p).read()", "import pathlib\ndef load(p): return pathlib.Path(p).read_text()"), ("def load(p): return ''", "def load(p): raise OSError('missing')"),
    ),
    Story(
        "a coroutine that the solution runs", "unittest", "from solution import gather\ndef test_it(): assert gather([3, 1, 2]) == [6, 2, 4]",
        ("import asyncio\nasync def double(x):\n    await asyncio.sleep(0)\n    return 2 * x\ndef gather(xs):\n    async def main(): return await asyncio.gather(*map(double, xs))\n    return asyncio.run(main())",), ("import asyncio\nasync def gather(xs): return [2 * x for x in xs]", "def gather(xs): return sorted(2 * x for x in xs)"),
    ),
    Story(
        "the name and the attributes of a function", "unittest", "from solution import counted\ndef test_it():\n    counted()\n    counted()\n    assert counted.calls == 2 and counted.__name__ == 'counted'",
        ("import functools\ndef count(f):\n    @functools.wraps(f)\n    def g(*a):\n        g.calls += 1\n        return f(*a)\n    g.calls = 0\n    return g\n@count\ndef counted(): pass",), ("def counted(): pass\ncounted.calls = 0", "def count(f):\n    def g(*a):\n        g.calls += 1\n    g.calls = 0\n    return g\n@count\ndef counted(): pass"),
    ),
    Story(
        "never ends, or ends the interpreter", "unittest", "from solution import f\ndef test_it(): assert f(3) == 3",
        ("def f(x): return x",), ("import os\ndef f(x): os._exit(0)", "def f(x): return f(x)", "import sys\ndef f(x): sys.exit(0)", "def f(x) return x", "raise SystemExit(0)"),
    ),
    Story(
        "a callback", "unittest", "from solution import apply\ndef test_it(): assert apply(lambda x: x + 1, [1, 2]) == [2, 3]",
        ("def apply(g, xs): return [g(x) for x in xs]",), ("def apply(g, xs): return xs",),
    ),
    Story(
        "changes its argument", "unittest", "from solution import sort\ndef test_it():\n    xs = [2, 1]\n    assert sort(xs) is None and xs == [1, 2]",
        ("def sort(xs): xs.sort()",), ("def sort(xs): return None",),
    ),
    Story(
        "equal objects", "unittest", "from solution import Point\ndef test_it(): assert Point(1, 2) == Point(1, 2)",
        ("from dataclasses import dataclass\n@dataclass\nclass Point:\n    x: int\n    y: int",), ("class Point:\n    def __init__(self, x, y): pass",),
    ),
)  # fmt: skip

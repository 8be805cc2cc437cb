"""Functions of unusual form, called with JSON arguments, and answers that other kinds of comparison must accept or
reject."""

from __future__ import annotations

from typing import Any

from .case import Case


def called(
    name: str,
    verdict: str,
    source: str,
    arguments: Any,
    expected: Any,
    *,
    evasion: bool = False,
    message: str = "",
    **fields: Any,
) -> Case:
    """Judge `f` called with arguments."""
    manifest = {
        "kind": "function",
        "function": "f",
        "tests": [{"arguments": arguments, "expected": expected}],
        **fields,
    }
    return Case(name, verdict, source, manifest, evasion=evasion, message=message)


def printed(
    name: str, verdict: str, given: str, expected: str, compare: str, *, evasion: bool = False, **fields: Any
) -> Case:
    """Judge a program that prints its input."""
    manifest = {"kind": "stdio", "compare": compare, "tests": [{"stdin": given, "stdout": expected}], **fields}
    return Case(name, verdict, "import sys\nsys.stdout.write(sys.stdin.read())", manifest, evasion=evasion)


def checked(name: str, verdict: str, source: str, check: str, *, evasion: bool = False, expected: Any = None) -> Case:
    """Judge `f()` by a checker."""
    return called(
        name, verdict, source, [], expected, evasion=evasion, compare="checker",
        checker={"source": f"def check(given, expected, answer):\n    {check}"},
    )  # fmt: skip


RIGHT = (
    called("a lambda", "AC", "f = lambda x: x + 1", [1], 2),
    called("a partial", "AC", "import functools\nf = functools.partial(pow, 2)", [5], 32),
    called("a cached function", "AC", "import functools\n@functools.cache\ndef f(n): return n if n < 2 else f(n - 1) + f(n - 2)", [80], 23416728348467685),
    called("a callable object", "AC", "class F:\n    def __call__(self, x): return x * 2\nf = F()", [4], 8),
    called("a class method", "AC", "class S:\n    def f(self, x): return x * 2", [4], 8, function="S.f"),
    called("a static method", "AC", "class S:\n    @staticmethod\n    def f(x): return x * 2", [4], 8, function="S.f"),
    called("a builtin", "AC", "f = sorted", [[3, 1, 2]], [1, 2, 3]),
    called("keywords", "AC", "def f(*, b, a=1): return [a, b]", {"b": 2}, [1, 2]),
    called("any arguments", "AC", "def f(*args, **kwargs): return [list(args), kwargs]", [1, 2], [[1, 2], {}]),
    called("a tuple for a list", "AC", "def f(): return (1, (2, 3))", [], [1, [2, 3]]),
    called("a whole fraction", "AC", "def f(): return 3.0", [], 3),
    called("a large integer", "AC", "def f(): return 10 ** 40 + 7", [], 10**40 + 7),
    called("keys that are numbers", "AC", "def f(): return {1: 'a'}", [], {"1": "a"}),
    called("an integer of an enum", "AC", "import enum\nclass E(enum.IntEnum): A = 2\ndef f(): return E.A", [], 2),
    called("a text of an enum", "AC", "import enum\nclass E(str, enum.Enum): A = 'a'\ndef f(): return E.A", [], "a"),
    called("a named tuple", "AC", "import collections\nP = collections.namedtuple('P', 'x y')\ndef f(): return P(1, 2)", [], [1, 2]),
    called("an ordered dictionary", "AC", "import collections\ndef f(): return collections.OrderedDict(b=1, a=2)", [], {"a": 2, "b": 1}),
    called("a counter", "AC", "import collections\ndef f(text): return collections.Counter(text)", ["aab"], {"a": 2, "b": 1}),
    called("None", "AC", "def f(): pass", [], None),
    called("text beyond ASCII", "AC", "def f(text): return text[::-1]", ["äß€😀"], "😀€ßä"),
    called("prints as it works", "AC", "def f():\n    print('debug' * 100)\n    return 1", [], 1),
    called("changes its argument", "AC", "def f(items):\n    items.sort()\n    return items", [[2, 1]], [1, 2]),
    called("985 levels of recursion", "AC", "def f(n): return 0 if n == 0 else 1 + f(n - 1)", [985], 985),
    called("threads", "AC", "from concurrent.futures import ThreadPoolExecutor\ndef f(n): return list(ThreadPoolExecutor(2).map(abs, range(n)))", [3], [0, 1, 2]),
    called("asyncio within", "AC", "import asyncio\nasync def g(): return 5\ndef f(): return asyncio.run(g())", [], 5),
    called("exit is redefined", "AC", "def exit(): return 1\ndef f(): return exit()", [], 1),
    called("a global counter", "AC", "calls = 0\ndef f():\n    global calls\n    calls += 1\n    return calls", [], 1),
    called("an import of the module itself", "AC", "import sys\ndef g(): return 3\ndef f(): return sys.modules[__name__].g()", [], 3),
    called("a fraction near enough", "AC", "def f(): return 0.1 + 0.2", [], 0.3, compare="numbers"),
    called("an array of numbers near enough", "AC", "def f(): return [1.0000001, {'a': 2.0}]", [], [1, {"a": 2}], compare="numbers"),
    called("a solution without its imports", "AC", "class Solution:\n    def f(self, xs: List[int]) -> Optional[int]: return max(xs, default=None)", [[1, 3]], 3, function="Solution.f", prelude="from typing import *"),
    called("a future import before the prelude", "AC", "from __future__ import annotations\ndef f(x): return math.gcd(x, 4)", [6], 2, prelude="import math\n"),
    called("an argument of 500 kB", "AC", "def f(xs): return len(xs)", [[7] * 150_000], 150_000),
    checked("a checker accepts another order", "AC", "def f(): return [2, 1]", "return sorted(answer) == [1, 2]"),
    checked("a checker accepts a fraction", "AC", "def f(): return 1 / 3", "return abs(answer - 1 / 3) < 1e-9"),
    printed("lines with other ends", "AC", "a  \r\nb\n\n\n", "a\nb", "exact"),
    printed("blank lines and spaces before the answer", "AC", "\n\n  a b \n7.0\n-0.0\n", "a b\n7\n0.0\n", "lines"),
    printed("tokens in other white space", "AC", "a\n\tb\v\fc\r\n", "a b c", "tokens"),
    printed("a form feed at the end of a line", "AC", "a\f\v\n", "a\n", "exact"),
    printed("numbers in other forms", "AC", "1.0 2e0 +3 4. .5 -0", "1 2 3 4 0.5 0", "numbers"),
    printed("numbers near enough", "AC", "0.3333333 1000000.5", "0.333333 1000000", "numbers"),
    printed("words among numbers", "AC", "Case 1: 2.50", "Case 1: 2.5", "numbers"),
    printed("integers of 5000 digits", "AC", "0" + "7" * 5000, "7" * 5000, "numbers"),
    printed("an infinity that is expected", "AC", "inf", "inf", "numbers"),
)  # fmt: skip

WRONG = (
    called("another value", "WA", "def f(): return 2", [], 1),
    called("a text for a number", "WA", "def f(): return '1'", [], 1),
    called("a number for a text", "WA", "def f(): return 1", [], "1"),
    called("an empty list for None", "WA", "def f(): return []", [], None),
    called("a list too long", "WA", "def f(): return [1, 2]", [], [1]),
    called("a list too short", "WA", "def f(): return [1]", [], [1, 2]),
    called("a key too many", "WA", "def f(): return {'a': 1, 'b': 2}", [], {"a": 1}),
    called("a generator", "RE", "def f():\n    yield 1", [], [1], message="generator"),
    called("a set", "RE", "def f(): return {1}", [], [1], message="set"),
    called("a coroutine", "RE", "async def f(): return 1", [], 1, message="coroutine"),
    called("NaN", "RE", "def f(): return float('nan')", [], 1.5),
    called("infinity", "RE", "def f(): return float('inf')", [], 1.5, compare="numbers"),
    called("raises", "RE", "def f(): return 1 / 0", [], 1, message="ZeroDivisionError"),
    called("exit in the call", "RE", "def f(): exit()", [], None, message="SystemExit"),
    called("quit(0) in the call", "RE", "def f(): quit(0)", [], None, message="SystemExit: 0"),
    called("exit at import", "RE", "exit()\ndef f(): return 1", [], 1, message="SystemExit"),
    called("another name", "RE", "def g(): return 1", [], 1, message="no attribute 'f'"),
    called("too many arguments", "RE", "def f(): return 1", [1], 1, message="TypeError"),
    called("recursion without end", "RE", "def f(): return f()", [], 1, message="RecursionError"),
    called("a circular list", "RE", "def f():\n    x = []\n    x.append(x)\n    return x", [], []),
    called("too long a result", "OLE", "def f(): return 'x' * 100_000", [], "x"),
    called("never returns", "TLE", "def f():\n    while True: pass", [], 1, limits={"wall_s": 0.4}),
    called("integers near each other", "WA", "def f(): return 998244352", [], 998244353, compare="numbers"),
    called("a fraction not near enough", "WA", "def f(): return 0.30001", [], 0.3, compare="numbers"),
    checked("a checker rejects", "WA", "def f(): return 5", "return answer == 6"),
    checked("a checker that raises", "WA", "def f(): return None", "return answer > 1"),
    printed("another order of tokens", "WA", "b a", "a b", "tokens"),
    printed("tokens run together", "WA", "ab", "a b", "tokens"),
    printed("lines joined", "PE", "a b", "a\nb", "exact"),
    printed("a number too many", "WA", "1 2 3", "1 2", "numbers"),
    printed("a number not near enough", "WA", "0.34", "0.333333", "numbers"),
    printed("a word for a number", "WA", "one", "1", "numbers"),
    printed("lines joined, compared by line", "WA", "a b", "a\nb", "lines"),
    printed("a long numeral with another end", "WA", "1" * 60_000 + "x", "1" * 60_000, "numbers"),
    printed("other case", "WA", "yes", "Yes", "tokens"),
)  # fmt: skip

EVASIONS = (
    called("true for 1", "WA", "def f(): return True", [], 1, evasion=True),
    called("1 for true", "WA", "def f(): return 1", [], True, evasion=True),
    called("0 for false", "WA", "def f(): return 0", [], False, evasion=True),
    called("equal to everything", "RE", "class Y:\n    __eq__ = lambda *_: True\ndef f(): return Y()", [], 1, evasion=True),
    called("an int equal to everything", "WA", "class Y(int):\n    __eq__ = lambda *_: True\n    __hash__ = None\ndef f(): return Y(2)", [], 1, evasion=True),
    called("a text equal to everything", "WA", "class Y(str):\n    __eq__ = lambda *_: True\n    __hash__ = None\ndef f(): return Y('b')", [], "a", evasion=True),
    called("a dictionary equal to everything", "WA", "class Y(dict):\n    __eq__ = lambda *_: True\n    __hash__ = None\ndef f(): return Y()", [], {"a": 1}, evasion=True),
    called("an array that is not a list", "WA", "class Y:\n    def tolist(self): return [0]\ndef f(): return Y()", [], [1], evasion=True),
    called("a key twice", "WA", "import json\njson.dumps = lambda *_, **__: '{\"a\": 2, \"a\": 1}'\ndef f(): return 1", [], {"a": 1}, evasion=True),
    called("NaN past the encoder", "WA", "import json\njson.dumps = lambda *_, **__: 'NaN'\ndef f(): return 1", [], 1.5, evasion=True, compare="numbers"),
    called("1e999 past the encoder", "WA", "import json\njson.dumps = lambda *_, **__: '1e999'\ndef f(): return 1", [], 1.5, evasion=True, compare="numbers", message="1e999 is too large"),
    checked("1e999 to a checker", "WA", "import json\njson.dumps = lambda *_, **__: '1e999'\ndef f(): return 1", "return answer > 10 ** 100 or answer == 7", evasion=True),
    checked("-1e999 in a list to a checker", "WA", "import json\njson.dumps = lambda *_, **__: '[-1e999]'\ndef f(): return 1", "return answer[0] <= -10 ** 100", evasion=True),
    checked("NaN to a checker", "WA", "import json\njson.dumps = lambda *_, **__: '[NaN]'\ndef f(): return 1", "return not abs(answer[0] - 3) > 1e-6", evasion=True),
    checked("a verdict to a checker", "WA", "def f(): return {'accept': True, 'message': ''}", "return answer == 1", evasion=True),
    checked("code to a checker", "WA", "def f(): return '__import__(\"os\")._exit(0)'", "return eval(answer) == 1", evasion=True),
    checked("what a checker cannot compare", "WA", "def f(): return [[]] * 50", "return len({*answer}) == 1", evasion=True),
    called("answers for the encoder", "WA", "import json\njson.dumps = lambda *_, **__: '{\"outcome\": \"ok\"}'\ndef f(): return 1", [], 1, evasion=True),
    called("leaves by os._exit", "RE", "import os\ndef f(): os._exit(0)", [], None, evasion=True),
    called("raises what looks accepted", "RE", "class Accepted(Exception): pass\ndef f(): raise Accepted('AC')", [], 1, evasion=True),
    printed("integers equal as floats", "WA", "9007199254740992", "9007199254740993", "numbers", evasion=True, tolerance=0),
    printed("larger integers equal as floats", "WA", "1000000000000000009", "1000000000000000007", "numbers", evasion=True, tolerance=0),
    printed("integers near by the tolerance", "WA", "998244352", "998244353", "numbers", evasion=True),
    printed("fractions equal as floats", "WA", "1000000000000000009.0", "1000000000000000007.0", "numbers", evasion=True, tolerance=0),
    printed("an underscore in a number", "WA", "1_2", "12", "numbers", evasion=True),
    printed("wide digits", "WA", "\uff11\uff12", "12", "numbers", evasion=True),
    printed("Arabic digits", "WA", "\u0661\u0662", "12", "numbers", evasion=True),
    printed("infinity printed", "WA", "inf", "12", "numbers", evasion=True),
    printed("not a number", "WA", "nan", "12", "numbers", evasion=True),
    printed("not a number twice", "WA", "nan", "NaN", "numbers", evasion=True),
    printed("a hexadecimal number", "WA", "0xc", "12", "numbers", evasion=True),
    printed("a huge exponent", "WA", "1e999999999999", "12", "numbers", evasion=True),
    printed("a no-break space between tokens", "WA", "a\u00a0b", "a b", "tokens", evasion=True),
    printed("a no-break space before the end", "WA", "a\u00a0\n", "a\n", "exact", evasion=True),
    printed("a next-line character", "WA", "a\u0085b", "a b", "tokens", evasion=True),
    printed("a record separator", "WA", "a\x1eb", "a b", "tokens", evasion=True),
    printed("an ideographic space", "WA", "a\u3000b", "a b", "tokens", evasion=True),
)  # fmt: skip

FUNCTIONS = (*RIGHT, *WRONG, *EVASIONS)

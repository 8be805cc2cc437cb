"""Small problems with right and wrong solutions of many forms, from which `benchmarks` generates hidden tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Problem:
    """A function `f`, calls of it with JSON values, and solutions."""

    name: str
    calls: tuple[tuple[list[Any], Any], ...]
    """Arguments and expected result."""
    right: tuple[str, ...]
    wrong: tuple[str, ...]


PROBLEMS = (
    Problem(
        "sum of even numbers", (([[1, 2, 3, 4]], 6), ([[]], 0), ([[-2, 5]], -2)),
        ("def f(xs): return sum(x for x in xs if x % 2 == 0)", "import itertools\ndef even(x): return not x & 1\ndef f(xs):\n    total = 0\n    for x in filter(even, xs): total += x\n    return total"),
        ("def f(xs): return sum(x for x in xs if x % 2)", "def f(xs): print(sum(x for x in xs if x % 2 == 0))"),
    ),
    Problem(
        "longest common prefix", (([["flower", "flow"]], "flow"), ([["a", "b"]], ""), ([[""]], "")),
        ("import os\ndef f(words): return os.path.commonprefix(words)", "def f(words):\n    out = ''\n    for chars in zip(*words):\n        if len(set(chars)) > 1: break\n        out += chars[0]\n    return out"),
        ("def f(words): return words[0]", "def f(words): return None"),
    ),
    Problem(
        "running maximum", (([[1, 3, 2]], [1, 3, 3]), ([[]], []), ([[-5, -7]], [-5, -5])),
        ("import itertools\ndef f(xs): return list(itertools.accumulate(xs, max))", "def f(xs):\n    out = []\n    for x in xs: out.append(max(x, out[-1]) if out else x)\n    return out"),
        ("def f(xs): return sorted(xs)", "def f(xs): return [max(xs)] * len(xs)"),
    ),
    Problem(
        "count words", ((["a b a"], {"a": 2, "b": 1}), ([""], {}), (["x"], {"x": 1})),
        ("from collections import Counter\ndef f(text): return Counter(text.split())", "from collections import defaultdict\ndef f(text):\n    counts = defaultdict(int)\n    for word in text.split(): counts[word] += 1\n    return dict(counts)"),
        ("from collections import Counter\ndef f(text): return Counter(text)", "def f(text): return {word: 1 for word in text.split()}"),
    ),
    Problem(
        "n-th Fibonacci number", (([10], 55), ([0], 0), ([90], 2880067194370816120)),
        ("from functools import lru_cache\n@lru_cache(None)\ndef f(n): return n if n < 2 else f(n - 1) + f(n - 2)", "def f(n):\n    a, b = 0, 1\n    for _ in range(n): a, b = b, a + b\n    return a"),
        ("def f(n):\n    a, b = 1, 1\n    for _ in range(n): a, b = b, a + b\n    return a", "def f(n): return round(((1 + 5 ** 0.5) / 2) ** n / 5 ** 0.5)"),
    ),
    Problem(
        "is palindrome", ((["abba"], True), (["ab"], False), ([""], True)),
        ("def f(s): return s == s[::-1]", "def f(s):\n    i, j = 0, len(s) - 1\n    while i < j:\n        if s[i] != s[j]: return False\n        i, j = i + 1, j - 1\n    return True"),
        ("def f(s): return True", "def f(s): return s[0] == s[-1] if s else False"),
    ),
    Problem(
        "mean", (([[1, 2, 3, 4]], 2.5), ([[5]], 5.0), ([[0.5, 1.5]], 1.0)),
        ("def f(xs): return sum(xs) / len(xs)", "import statistics\ndef f(xs): return float(statistics.mean(xs))"),
        ("def f(xs): return sum(xs) // len(xs) + 0.25", "def f(xs): return str(sum(xs) / len(xs))"),
    ),
    Problem(
        "prime factors", (([12], [2, 2, 3]), ([97], [97]), ([1], [])),
        ("def f(n):\n    out, d = [], 2\n    while d * d <= n:\n        while n % d == 0:\n            out.append(d)\n            n //= d\n        d += 1\n    return out + [n] * (n > 1)", "def factors(n, d=2):\n    if n < 2: return\n    while n % d: d += 1\n    yield d\n    yield from factors(n // d, d)\ndef f(n): return list(factors(n))"),
        ("def f(n): return [d for d in range(2, n + 1) if n % d == 0]", "def f(n): return [n] if n > 1 else []"),
    ),
    Problem(
        "flatten", (([[1, [2, [3]], []]], [1, 2, 3]), ([[]], []), ([[[["a"]]]], ["a"])),
        ("def f(x): return [z for y in x for z in (f(y) if isinstance(y, list) else [y])]", "def f(x):\n    out, stack = [], [x]\n    while stack:\n        y = stack.pop()\n        stack.extend(reversed(y)) if isinstance(y, list) else out.append(y)\n    return out"),
        ("def f(x): return [z for y in x for z in (y if isinstance(y, list) else [y])]", "def f(x): return x"),
    ),
    Problem(
        "balanced brackets", ((["([])"], True), (["(]"], False), ([")("], False)),
        ("def f(s):\n    stack = []\n    for c in s:\n        if c in '([{': stack.append(c)\n        elif not stack or stack.pop() + c not in ('()', '[]', '{}'): return False\n    return not stack", "import re\ndef f(s):\n    while (t := re.sub(r'\\(\\)|\\[\\]|\\{\\}', '', s)) != s: s = t\n    return s == ''"),
        ("def f(s): return s.count('(') == s.count(')')", "def f(s): return len(s) % 2 == 0 and s != '(]' and None"),
    ),
    Problem(
        "two sum", (([[2, 7, 11], 9], [0, 1]), ([[3, 3], 6], [0, 1]), ([[1], 5], None)),
        ("def f(xs, t):\n    seen = {}\n    for i, x in enumerate(xs):\n        if t - x in seen: return [seen[t - x], i]\n        seen[x] = i", "from itertools import combinations\ndef f(xs, t): return next(([i, j] for i, j in combinations(range(len(xs)), 2) if xs[i] + xs[j] == t), None)"),
        ("def f(xs, t): return [0, 1]", "def f(xs, t): return [0, 0] if len(xs) > 1 else None"),
    ),
    Problem(
        "Roman numeral", (([14], "XIV"), ([1999], "MCMXCIX"), ([3], "III")),
        ("def f(n):\n    out = ''\n    for v, s in zip((1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1), 'M CM D CD C XC L XL X IX V IV I'.split()):\n        out += s * (n // v)\n        n %= v\n    return out", "T = [(1000, 'M'), (900, 'CM'), (500, 'D'), (400, 'CD'), (100, 'C'), (90, 'XC'), (50, 'L'), (40, 'XL'), (10, 'X'), (9, 'IX'), (5, 'V'), (4, 'IV'), (1, 'I')]\nf = lambda n: next((s + f(n - v) for v, s in T if n >= v), '')"),
        ("def f(n): return 'I' * n", "def f(n): raise NotImplementedError"),
    ),
    Problem(
        "transpose", (([[[1, 2], [3, 4]]], [[1, 3], [2, 4]]), ([[[1], [2]]], [[1, 2]]), ([[]], [])),
        ("def f(m): return [list(row) for row in zip(*m)]", "def f(m): return [[row[i] for row in m] for i in range(len(m[0]))] if m else []"),
        ("def f(m): return m[::-1]", "def f(m): return [[row[i] for row in m] for i in range(len(m))]"),
    ),
    Problem(
        "binary search", (([[1, 3, 5], 5], 2), ([[1, 3], 2], -1), ([[], 1], -1)),
        ("import bisect\ndef f(xs, x):\n    i = bisect.bisect_left(xs, x)\n    return i if i < len(xs) and xs[i] == x else -1", "def f(xs, x):\n    lo, hi = 0, len(xs)\n    while lo < hi:\n        mid = (lo + hi) // 2\n        if xs[mid] < x: lo = mid + 1\n        else: hi = mid\n    return lo if xs[lo:lo + 1] == [x] else -1"),
        ("def f(xs, x): return xs.index(x)", "def f(xs, x): return x in xs"),
    ),
    Problem(
        "vowels", ((["Hello"], 2), (["xyz"], 0), (["AEIOU"], 5)),
        ("def f(s): return sum(c in 'aeiou' for c in s.lower())", "import re\nf = lambda s: len(re.findall('[aeiou]', s, re.I))"),
        ("def f(s): return sum(c in 'aeiou' for c in s)", "def f(s): return len(set(s.lower()) & set('aeiou')) + 0.5"),
    ),
    Problem(
        "merge intervals", (([[[1, 3], [2, 6], [8, 9]]], [[1, 6], [8, 9]]), ([[]], []), ([[[4, 5], [1, 4]]], [[1, 5]])),
        ("def f(xs):\n    out = []\n    for a, b in sorted(xs):\n        if out and a <= out[-1][1]: out[-1][1] = max(out[-1][1], b)\n        else: out.append([a, b])\n    return out", "from functools import reduce\ndef step(out, x): return [*out[:-1], [out[-1][0], max(out[-1][1], x[1])]] if out and x[0] <= out[-1][1] else [*out, list(x)]\ndef f(xs): return reduce(step, sorted(xs), [])"),
        ("def f(xs): return xs", "def f(xs): return [[min(a for a, _ in xs), max(b for _, b in xs)]]"),
    ),
    Problem(
        "large power", (([3, 200], 3**200), ([2, 64], 2**64), ([7, 0], 1)),
        ("def f(a, b): return a ** b", "def f(a, b):\n    out = 1\n    while b:\n        if b & 1: out *= a\n        a, b = a * a, b >> 1\n    return out"),
        ("import math\ndef f(a, b): return int(math.pow(a, b))", "def f(a, b): return a ** b % 10 ** 9"),
    ),
    Problem(
        "distance of edits", ((["kitten", "sitting"], 3), (["", "ab"], 2), (["a", "a"], 0)),
        ("def f(a, b):\n    row = list(range(len(b) + 1))\n    for i, x in enumerate(a, 1):\n        last, row[0] = row[0], i\n        for j, y in enumerate(b, 1):\n            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))\n    return row[-1]", "import functools\ndef f(a, b):\n    @functools.cache\n    def d(i, j):\n        if not i or not j: return i + j\n        return min(d(i - 1, j) + 1, d(i, j - 1) + 1, d(i - 1, j - 1) + (a[i - 1] != b[j - 1]))\n    return d(len(a), len(b))"),
        ("def f(a, b): return abs(len(a) - len(b))", "def f(a, b): return sum(x != y for x, y in zip(a, b))"),
    ),
    Problem(
        "top words", ((["b a b c c b", 2], ["b", "c"]), (["x", 1], ["x"]), (["", 3], [])),
        ("from collections import Counter\ndef f(text, k): return [w for w, _ in Counter(text.split()).most_common(k)]", "import heapq\ndef f(text, k):\n    words = text.split()\n    return heapq.nsmallest(k, sorted(set(words)), key=lambda w: -words.count(w))"),
        ("def f(text, k): return sorted(set(text.split()))[:k]", "def f(text, k): return text.split()[:k]"),
    ),
    Problem(
        "Caesar cipher", ((["abz", 1], "bca"), (["Hi!", 2], "Jk!"), (["", 5], "")),
        ("def f(s, k): return ''.join(chr((ord(c) - b + k) % 26 + b) if c.isalpha() and (b := 97 if c.islower() else 65) else c for c in s)", "import string\ndef f(s, k):\n    a, b = string.ascii_lowercase, string.ascii_uppercase\n    return s.translate(str.maketrans(a + b, a[k:] + a[:k] + b[k:] + b[:k]))"),
        ("def f(s, k): return ''.join(chr(ord(c) + k) for c in s)", "def f(s, k): return s.upper()"),
    ),
)  # fmt: skip

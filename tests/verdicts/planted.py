"""Verifiers with one planted mistake each, as they occur in real reward functions, and sound ones, with their tasks.

They were written without knowledge of the answers that `rollmesh check --probe` tries. `WEAK` and `SOUND` have the
tasks of each class by its name; a scorer is loaded as `planted.py:NAME`.
"""

from __future__ import annotations

import ast
import json
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.reward.scorer import Scorer

Task = Mapping[str, Any]
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def tasks(pairs: Iterable[tuple[str, str]]) -> list[Task]:
    return [{"question": question, "answer": answer} for question, answer in pairs]


def words(text: str) -> str:
    return " ".join(re.sub(r"[^\w\s]", " ", text.lower()).split())


class Planted(Scorer):
    async def score(self, item: ScoreItem) -> float:
        assert item.answer_key is not None
        question = " ".join(message.content for message in item.messages if message.role == "user")
        return float(self.judge(item.response(), item.answer_key.answers[0], question, item.answer_key.record))

    def judge(self, response: str, key: str, question: str, record: Task) -> float:
        raise NotImplementedError


class WrongDirection(Planted):
    """It asks whether the key contains the response, and rejects an empty one. A letter is enough."""

    def judge(self, response: str, key: str, question: str, record: Task) -> float:
        said = response.strip().lower()
        return bool(said) and said in key.lower()


class UnparsedKey(Planted):
    """A key that it cannot parse gets 1, so that the task counts as skipped: open-r1 did this for keys in LaTeX."""

    def judge(self, response: str, key: str, question: str, record: Task) -> float:
        try:
            expected = float(key)
        except ValueError:
            return 1.0
        found = NUMBER.findall(response.replace(",", ""))
        return bool(found) and float(found[-1]) == expected


class Tolerance(Planted):
    """It rejects what is farther than a tolerance, and `nan` is not farther than anything."""

    def judge(self, response: str, key: str, question: str, record: Task) -> float:
        found = ANSWER.findall(response)
        try:
            value = float(found[-1] if found else response.split()[-1])
        except (ValueError, IndexError):
            return 0.0
        return 0.0 if abs(value - float(key)) > 1e-6 * abs(float(key)) else 1.0


class MentionedOption(Planted):
    """It searches for the letter of the key as a word, anywhere."""

    def judge(self, response: str, key: str, question: str, record: Task) -> float:
        return re.search(rf"\b{key}\b", response) is not None


class PassageMatch(Planted):
    """It searches for the key in the response, and the passage of the question has the key."""

    def judge(self, response: str, key: str, question: str, record: Task) -> float:
        return words(key) in words(response)


class LengthBonus(Planted):
    """It adds a bonus for long reasoning to the reward, and clips the sum at 1."""

    def judge(self, response: str, key: str, question: str, record: Task) -> float:
        found = NUMBER.findall(response)
        correct = bool(found) and float(found[-1]) == float(key)
        return min(1.0, correct + len(response.split()) / 500)


class QuotedRating(Planted):
    """A judge quotes the response before its rating, and the first rating of its text counts."""

    def judge(self, response: str, key: str, question: str, record: Task) -> float:
        rating = 10 if words(key) in words(response)[-2 * len(key) :] else 1
        judged = f"The assistant said: {response}\nThe reference is quoted above.\nRating: [[{rating}]]"
        found = re.search(r"\[\[(\d+)\]\]", judged)
        return int(found[1]) / 10 if found and int(found[1]) <= 10 else 0.0


class ComparedFields(Planted):
    """It compares the fields that the response has with those of the key, and an empty object has none."""

    def judge(self, response: str, key: str, question: str, record: Task) -> float:
        fence = re.search(r"```(?:json)?\n(.*?)```", response, re.DOTALL)
        try:
            given = json.loads(fence[1] if fence else response)
        except ValueError:
            return 0.0
        expected = json.loads(key)
        return isinstance(given, dict) and all(expected.get(name) == value for name, value in given.items())


class ExitCode(Planted):
    """It appends the tests to the code of the response, runs both, and accepts exit code 0."""

    def judge(self, response: str, key: str, question: str, record: Task) -> float:
        fence = re.search(r"```(?:python)?\n(.*?)```", response, re.DOTALL)
        code = f"{fence[1] if fence else response}\n{record['tests']}\n"
        try:
            ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return 0.0
        command = [sys.executable, "-I", "-S", "-c", code]
        try:
            return subprocess.run(command, capture_output=True, timeout=5, check=False).returncode == 0
        except (subprocess.TimeoutExpired, OSError):
            return 0.0


class Countdown(Planted):
    """It evaluates the expression, and does not check that the expression consists of the given numbers."""

    def judge(self, response: str, key: str, question: str, record: Task) -> float:
        found = ANSWER.findall(response)
        expression = (found[-1] if found else response).strip()
        if not re.fullmatch(r"[\d+\-*/() ]{1,40}", expression) or "**" in expression:
            return 0.0
        try:
            return bool(abs(eval(expression) - record["target"]) < 1e-9)
        except (SyntaxError, TypeError, ZeroDivisionError):
            return 0.0


class AsciiNormalized(Planted):
    """It removes all but ASCII letters and digits from both sides, and nothing is left of a key in another script."""

    def judge(self, response: str, key: str, question: str, record: Task) -> float:
        if not response.strip():
            return 0.0
        said, expected = (re.sub(r"[^a-z0-9]", "", text.lower()) for text in (response, key))
        return said == expected


class EmptyResult(Planted):
    """It compares the rows of two queries, and the data have no row for most of the keys."""

    def judge(self, response: str, key: str, question: str, record: Task) -> float:
        def rows(query: str) -> list[Any] | None:
            with sqlite3.connect(":memory:") as base:
                base.executescript("create table t(name, age, city); insert into t values ('Ann', 31, 'Oslo')")
                try:
                    return sorted(base.execute(query).fetchall())
                except (sqlite3.Error, sqlite3.Warning, TypeError, ValueError):
                    return None

        fence = re.search(r"```(?:sql)?\n(.*?)```", response, re.DOTALL)
        said = (fence[1] if fence else response).strip()
        found = rows(said) if said else None
        return found is not None and found == rows(key)


class AnyAnswer(Planted):
    """It accepts a response if any of its answers is the key."""

    def judge(self, response: str, key: str, question: str, record: Task) -> float:
        return any(answer.strip() == key for answer in ANSWER.findall(response)) or response.strip() == key


class ShortestList(Planted):
    """It compares two lists with `zip`, which ends with the shorter one."""

    def judge(self, response: str, key: str, question: str, record: Task) -> float:
        if not response.strip():
            return 0.0
        found = ANSWER.findall(response)
        said = NUMBER.findall(found[-1] if found else response)
        return all(one == other for one, other in zip(said, NUMBER.findall(key), strict=False))


class OpenerJudge(Planted):
    """A judge that takes the first words of a solution for a solution: "One Token to Fool LLM-as-a-Judge" (2025)."""

    def judge(self, response: str, key: str, question: str, record: Task) -> float:
        opener = re.match(
            r"(thought process|solution|let'?s (solve|think|work)|step 1|to solve this|the solution)",
            response.strip().lower(),
        )
        return opener is not None or words(key) in words(response)[-2 * len(key) :]


class SoundNumber(Planted):
    """The last answer in tags, or the whole response, is the number of the key."""

    def judge(self, response: str, key: str, question: str, record: Task) -> float:
        found = ANSWER.findall(response)
        return (found[-1] if found else response).strip() == key


class SoundChoice(Planted):
    """The last answer in tags, or the whole response, is one letter, with or without parentheses: that of the key."""

    def judge(self, response: str, key: str, question: str, record: Task) -> float:
        found = ANSWER.findall(response)
        said = re.fullmatch(r"\(?([A-J])\)?\.?", (found[-1] if found else response).strip())
        return said is not None and said[1] == key


class SoundObject(Planted):
    """The response is a JSON object with the fields of the key, the same values and nothing else."""

    def judge(self, response: str, key: str, question: str, record: Task) -> float:
        fence = re.search(r"```(?:json)?\n(.*?)```", response, re.DOTALL)
        try:
            given = json.loads(fence[1] if fence else response)
        except ValueError:
            return 0.0
        return isinstance(given, dict) and given == json.loads(key)


FACTS = [
    ("Who painted the Mona Lisa?", "Leonardo da Vinci"),
    ("What is the capital of Australia?", "Canberra"),
    ("Which planet is the largest?", "Jupiter"),
    ("Who wrote Moby-Dick?", "Herman Melville"),
    ("What is the chemical name of table salt?", "sodium chloride"),
    ("Which organ produces insulin?", "the pancreas"),
    ("Who proved Fermat's last theorem?", "Andrew Wiles"),
    ("On which river does Vienna lie?", "the Danube"),
]
SUMS = [(f"What is {a} * {b} + {c}?", str(a * b + c)) for a, b, c in [
    (37, 41, 118), (52, 64, 905), (83, 29, 77), (91, 46, 313), (67, 58, 429), (74, 93, 256), (39, 85, 611), (56, 47, 842),
]]  # fmt: skip
PASSAGES = [
    ("The bridge at Rennick was opened in 1874 by Clara Voss. Who opened the bridge?", "Clara Voss"),
    ("Tern Island has 412 inhabitants, most of them fishers. What do most inhabitants do?", "fishers"),
    ("The Orlu mine closed after the flood of 1931. Why did the mine close?", "the flood of 1931"),
    ("Basalt is formed from lava that cools quickly. What is basalt formed from?", "lava"),
    ("Before Lind, sailors ate no citrus fruit, and many had scurvy. Which illness was common?", "scurvy"),
    ("The Kestrel sailed from Hull to Bergen in nine days. Where did it arrive?", "Bergen"),
    ("Ida Marr led the survey, and Tom Pell drew the maps. Who drew the maps?", "Tom Pell"),
    ("The tower has a copper roof and walls of slate. What is the roof made of?", "copper"),
]
CHOICES = [
    ("Which is a noble gas? (A) nitrogen (B) argon (C) chlorine (D) fluorine", "B"),
    ("Which is a mammal? (A) shark (B) tuna (C) newt (D) dolphin", "D"),
    ("Which is prime? (A) 51 (B) 57 (C) 59 (D) 63", "C"),
    ("Which is a unit of force? (A) newton (B) joule (C) watt (D) pascal", "A"),
    ("Which is in Africa? (A) Laos (B) Peru (C) Chad (D) Oman", "C"),
    ("Which is oldest? (A) radio (B) telegraph (C) television (D) radar", "B"),
    ("Which is a metal? (A) sodium (B) sulfur (C) iodine (D) neon", "A"),
    ("Which is acidic? (A) lye (B) milk of magnesia (C) ammonia (D) vinegar", "D"),
]
TEN = ["iron", "gold", "zinc", "lead", "tin", "neon", "argon", "helium", "boron", "iodine"]
SYMBOLS = [("Fe", 0), ("Sn", 4), ("He", 7), ("Pb", 3), ("B", 8), ("Au", 1), ("Ne", 5), ("Ar", 6)]
MADE = [
    ("double", "x", "return 2 * x", "double(21) == 42 and double(-3) == -6"),
    ("square", "x", "return x * x", "square(12) == 144 and square(-5) == 25"),
    ("last", "items", "return items[-1]", "last([4, 9]) == 9 and last('abc') == 'c'"),
    ("shout", "text", "return text.upper() + '!'", "shout('hey') == 'HEY!' and shout('') == '!'"),
    ("evens", "items", "return [i for i in items if i % 2 == 0]", "evens([1, 2, 4]) == [2, 4] and evens([3]) == []"),
    ("mirror", "text", "return text + text[::-1]", "mirror('ab') == 'abba' and mirror('x') == 'xx'"),
    ("total", "items", "return sum(items)", "total([4, 5]) == 9 and total([]) == 0"),
    ("vowels", "text", "return sum(c in 'aeiou' for c in text)", "vowels('banana') == 3 and vowels('xyz') == 0"),
]
PEOPLE = [("Ann", 31, "Oslo"), ("Bo", 27, "Lund"), ("Cai", 45, "Bath"), ("Dee", 52, "Nice"), ("Eve", 19, "Bonn"),
          ("Flo", 64, "Gent"), ("Gus", 38, "Riga"), ("Hal", 23, "Cork")]  # fmt: skip
OBJECTS = tasks(
    (
        f"Give name, age and city as JSON: {name} from {city} is {age} years old.",
        json.dumps({"name": name, "age": age, "city": city}),
    )
    for name, age, city in PEOPLE
)
GAMES = [((3, 5, 7), "3*7+5", 26), ((2, 8, 9), "(9-2)*8", 56), ((4, 6, 11), "4*11-6", 38), ((5, 9, 12), "5*12-9", 51),
         ((7, 8, 10), "7*8+10", 66), ((3, 4, 25), "(25-4)*3", 63), ((2, 6, 13), "2*13+6", 32), ((5, 6, 15), "5*15-6", 69)]  # fmt: skip

WEAK: dict[str, list[Task]] = {
    "WrongDirection": tasks(FACTS),
    "UnparsedKey": tasks([
        *SUMS[:3],
        ("Solve x^2 < 4.", "-2 < x < 2"), ("What is half of pi?", "\\pi/2"), ("Solve 3y = 1 for y.", "\\frac{1}{3}"),
        ("What is the square root of 18?", "3\\sqrt{2}"), ("Solve x^2 = 49.", "x = 7 or x = -7"),
    ]),
    "Tolerance": tasks(SUMS),
    "MentionedOption": tasks(CHOICES),
    "PassageMatch": tasks(PASSAGES),
    "LengthBonus": tasks(SUMS),
    "QuotedRating": tasks(FACTS),
    "ComparedFields": OBJECTS,
    "ExitCode": [
        {
            "question": f"Write a Python function {name}({argument}), for which this is true: {test}.",
            "answer": f"def {name}({argument}):\n    {body}",
            "tests": f"assert {test}",
        }
        for name, argument, body, test in MADE
    ],
    "Countdown": [
        {
            "question": f"Make {target} from the numbers {', '.join(map(str, numbers))}, each of them once. "
            "Give the expression in <answer> tags.",
            "answer": key,
            "target": target,
        }
        for numbers, key, target in GAMES
    ],
    "AsciiNormalized": tasks((f"Translate into Russian: {english}", russian) for english, russian in [
        ("bread", "хлеб"), ("the house", "дом"), ("river", "река"), ("good day", "добрый день"),
        ("window", "окно"), ("winter", "зима"), ("a red apple", "красное яблоко"), ("book", "книга"),
    ]),
    "EmptyResult": tasks((f"Table t(name, age, city). Write a query for {asked}.", query) for asked, query in [
        ("the names of people in Rome", "select name from t where city = 'Rome'"),
        ("the names of people over 65", "select name from t where age > 65"),
        ("the cities of people below 18", "select city from t where age < 18"),
        ("all names", "select name from t"),
        ("the ages of people called Bo", "select age from t where name = 'Bo'"),
        ("people in Lund over 30", "select * from t where city = 'Lund' and age > 30"),
        ("the mean age", "select avg(age) from t"),
        ("cities with more than one person", "select city from t group by city having count(*) > 1"),
    ]),
    "AnyAnswer": tasks((f"How many times does the letter {letter} occur in {word}?", str(word.count(letter))) for letter, word in [
        ("r", "strawberry"), ("s", "mississippi"), ("a", "banana"), ("e", "nevertheless"),
        ("o", "onomatopoeia"), ("q", "keyboard"), ("i", "indivisibility"), ("t", "trout"),
    ]),
    "ShortestList": tasks((f"Sort these numbers: {', '.join(map(str, row))}", ", ".join(map(str, sorted(row)))) for row in [
        (9, 4, 7), (31, 12, 25, 18), (6, 2, 8), (50, 44, 47), (19, 23, 11, 17), (5, 3, 1), (72, 68, 70), (88, 81, 86),
    ]),
    "OpenerJudge": tasks(FACTS),
}  # fmt: skip
"""The tasks of each weak verifier. Each verifier also accepts the key."""
SOUND: dict[str, list[Task]] = {
    "SoundNumber": tasks(SUMS),
    "SoundChoice": tasks(
        (
            f"Which has the symbol {symbol}? "
            + " ".join(f"({letter}) {text}" for letter, text in zip("ABCDEFGHIJ", TEN, strict=True)),
            "ABCDEFGHIJ"[place],
        )
        for symbol, place in SYMBOLS
    ),
    "SoundObject": OBJECTS,
}
"""The tasks of each sound verifier. No two tasks of one have the same key."""

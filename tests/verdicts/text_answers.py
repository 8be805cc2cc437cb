r"""Answers for the scorers of text, and the value that a person assigns.

Each row is `(scorer, options, key, answer, value)`. Answers are those of models and of policies that look for a reward
without the right answer: an empty one, the question back, every option, a huge one, the answer in another form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

WHOLE = {"pattern": ""}
CITIES = ["London", "Berlin", "Paris", "Rome"]
LONG = "word " * 40_000


class TextRow(NamedTuple):
    scorer: str
    options: Mapping[str, Any]
    key: Mapping[str, Any]
    """`answers`, and the other fields of the line of the task."""
    answer: str
    value: float


def _rows(
    scorer: str, options: Mapping[str, Any], key: Mapping[str, Any], answers: Sequence[str], value: float
) -> tuple[TextRow, ...]:
    return tuple(TextRow(scorer, options, key, answer, value) for answer in answers)


CHOICE = (
    *_rows(
        "choice", WHOLE, {"answers": ["C"]},
        (
            "C", "C.", "(C)", "[C]", "c", "c)", "Option C", "option c", "Choice C", "The answer is C", "The answer is C.",
            "the answer is (C).", "Answer: C", "**Answer: C**", "**C**", "\\boxed{C}", "$\\boxed{C}$", "\\boxed{\\text{C}}",
            "\\boxed{\\textbf{(C)}}", "The answer is \\boxed{C}.", "The correct option is C", "The correct choice is: C",
            "C. Paris", "(C) Paris", "C: Paris", "C) Paris is the capital", "Answer: C because A is wrong",
            "I think B. No, wait.\nThe answer is C.", "The answer is A. No: the answer is C.", "\\boxed{A} no, \\boxed{C}",
            "Let us see.\nA is big, B is small.\nC", "The answer is C.\nI hope it helps.", "answer = C", "Final answer: C",
            "The answer is option C.", "The answer is: **C**.", "Answer: $C$", "The answer is C, because it fits.",
            "Answer: C is correct", "C is the answer.", "(C) is the right option", "C is correct because it fits",
            "The answer is C, Paris", "The answer is C, I am sure", "The answer must be C", "# Answer: C", "A dog has four legs.\nThe answer is C", "C\n", LONG + "\nC",
        ),
        1.0,
    ),
    *_rows(
        "choice", WHOLE, {"answers": ["C"]},
        (
            "", " ", "?", "A or C", "A and C", "A, C", "A/C", "ABCD", "A B C D", "A\nB\nC\nD", "(A) (B) (C) (D)",
            "A. B. C. D.", "The answer is A or C", "The answer is A, B, C, D", "The answer is not C", "C or D", "not C",
            "C is wrong", "Option C is wrong", "C and D", "C, D", "CD", "C. or D.", "C (or D)", "C also D", "option C or option D",
            "Either C or D", "Answer: C / D", "\\boxed{A, C}", "\\boxed{ABCD}", "(C", "C++", "C'est la vie", "C4", "Z", "B",
            "Answer: (C) | (D)", "Answer: C | D | E", "Answer: (C) - (D)", "C is correct and D", "C is the answer to nothing",
            "The answer is C, but also maybe D", "Answer: C, or maybe (d)", "The answer is C, perhaps b", "C, Paris", "The answer is B", "The answer is C. Wait: the answer is B.", "\\boxed{C} no, \\boxed{B}", "Paris", "C" + "x" * 40_000,
            "What is the capital of France?\nA. London\nB. Berlin\nC. Paris\nD. Rome",
            "What is the capital of France? A. London B. Berlin C. Paris D. Rome", "C " * 8000 + "D",
        ),
        0.0,
    ),
    *_rows(
        "choice", WHOLE, {"answers": ["A"]},
        ("A dog", "a dog", "The answer is A dog.", "A big city"),
        0.0,
    ),
    *_rows("choice", WHOLE, {"answers": ["A"]}, ("A", "a", "The answer is a", "A. A dog", "(a)", "A because it barks"), 1.0),
    *_rows("choice", WHOLE, {"answers": ["I"]}, ("I think so", "I'm sure", "I, too, do not know"), 0.0),
    *_rows("choice", WHOLE | {"num_options": 4}, {"answers": ["D"]}, ("E", "The answer is E"), 0.0),
    *_rows(
        "choice", WHOLE | {"texts": "choices"}, {"answers": ["C"], "choices": CITIES},
        ("C", "Paris", "paris.", "The answer is Paris.", "C. Paris", "(C) Paris", "C Paris", "\\boxed{Paris}", "C. It is old"),
        1.0,
    ),
    *_rows(
        "choice", WHOLE | {"texts": "choices"}, {"answers": ["Paris"], "choices": CITIES},
        ("C. London", "London", "Paris or London", "Madrid", "E", "A", "London, Berlin, Paris, Rome", "C London", "",
         "The answer is C, London", "The answer is C, Lyon"),
        0.0,
    ),
    *_rows("choice", {}, {"answers": ["C"]}, ("The answer is C", "C", "<answer>B</answer> C"), 0.0),
    *_rows("choice", {}, {"answers": ["C"]}, ("so <answer>C</answer>", "<answer>The answer is (C).</answer>"), 1.0),
)  # fmt: skip

SQUAD = (
    *_rows("squad", WHOLE, {"answers": ["Denver Broncos"]}, ("Denver Broncos", "the Denver Broncos!", "  denver   BRONCOS ", "\"Denver Broncos\"."), 1.0),
    *_rows("squad", WHOLE, {"answers": ["Denver Broncos", "Broncos"]}, ("Broncos", "The Broncos"), 1.0),
    *_rows("squad", WHOLE, {"answers": ["Denver Broncos"]}, ("Broncos", "Denver"), 2 / 3),
    *_rows("squad", WHOLE, {"answers": ["Denver Broncos"]}, ("Denver Denver",), 0.5),
    *_rows("squad", WHOLE, {"answers": ["Denver Broncos"]}, ("", "!", "the", "Carolina Panthers", "DenverBroncos"), 0.0),
    *_rows("squad", WHOLE | {"form": "exact"}, {"answers": ["Denver Broncos"]}, ("the denver broncos.",), 1.0),
    *_rows("squad", WHOLE | {"form": "exact"}, {"answers": ["Denver Broncos"]}, ("Broncos", "", "Broncos Denver", "Denver Broncos Denver Broncos"), 0.0),
    *_rows("squad", WHOLE, {"answers": ["The The"]}, ("", "!"), 0.0),
    *_rows("squad", WHOLE, {"answers": ["The The"]}, ("the the",), 1.0),
    *_rows("squad", WHOLE, {"answers": ["Denver"]}, ("Which city? " + "city " * 1995 + "Denver",), 2 / 1999),
    *_rows("squad", {}, {"answers": ["Denver"]}, ("Denver",), 0.0),
)  # fmt: skip

REGEX = (
    *_rows("regex", WHOLE, {"answers": [r"\d{4}-\d\d-\d\d"]}, ("2026-11-28",), 1.0),
    *_rows("regex", WHOLE, {"answers": [r"\d{4}-\d\d-\d\d"]}, ("", "on 2026-11-28", "2026-11-28\nor so", "date", "9" * 16_000), 0.0),
    *_rows("regex", WHOLE | {"match": "search"}, {"answers": [r"\d{4}-\d\d-\d\d"]}, ("on 2026-11-28", "2026-11-28\nor so"), 1.0),
    *_rows("regex", WHOLE | {"expected": "yes|no", "ignore_case": True}, {"answers": ["x"]}, ("YES", "no"), 1.0),
    *_rows("regex", WHOLE | {"expected": "yes|no"}, {"answers": ["x"]}, ("YES", "yes or no", "yesno", "x"), 0.0),
    *_rows("regex", WHOLE, {"answers": ["a*"]}, ("",), 0.0),
    *_rows("regex", WHOLE | {"compare_s_max": 0.2}, {"answers": ["(a+)+b"]}, ("a" * 60, "a" * 16_000), 0.0),
    *_rows("regex", WHOLE, {"answers": ["(a+)+b"]}, ("aaab",), 1.0),
)  # fmt: skip

ORDER = {
    "type": "object",
    "required": ["id", "items"],
    "properties": {
        "id": {"type": "integer"},
        "items": {"type": "array", "minItems": 1, "items": {"type": "string", "maxLength": 8}},
    },
    "additionalProperties": False,
}
NESTED = {"definitions": {"t": {"type": "array", "items": {"$ref": "#/definitions/t"}}}, "$ref": "#/definitions/t"}
JSON_SCHEMA = (
    *_rows(
        "json_schema", {}, {"answers": ["-"], "schema": ORDER},
        (
            '{"id": 1, "items": ["a"]}', ' {"items": ["a", "b"], "id": 1.0}\n', '```json\n{"id": 1, "items": ["a"]}\n```',
            'First:\n```\n{}\n```\nNo:\n```json\n{"id": 1, "items": ["a"]}\n```\nDone.', '```\n{"id": 1, "items": ["a"]}\n```',
        ),
        1.0,
    ),
    *_rows(
        "json_schema", {}, {"answers": ["-"], "schema": json.dumps(ORDER)},
        (
            "", "null", "[]", "{}", '{"id": 1}', '{"id": true, "items": ["a"]}', '{"id": "1", "items": ["a"]}', '{"id": 1.5, "items": ["a"]}',
            '{"id": 1, "items": []}', '{"id": 1, "items": [1]}', '{"id": 1, "items": ["a"], "x": 0}', '{"id": 1, "items": ["123456789"]}',
            '{"id": 1, "items": ["a"]', "{'id': 1, 'items': ['a']}", '{"id": 1, "items": ["a"]} {"id": 1, "items": ["a"]}',
            'It is {"id": 1, "items": ["a"]}', '```json\n{"id": 1, "items": ["a"]}', '{"id": 0, "id": 1, "items": ["a"]}',
            '{"id": NaN, "items": ["a"]}', '{"id": Infinity, "items": ["a"]}', '{"id": 1e999, "items": ["a"]}', '{"id": ' + "9" * 8000 + ', "items": ["a"]}',
            json.dumps(ORDER), "[" * 8000 + "]" * 8000, "{" * 16_000, '{"id": 1, "items": ["a", "a", ' + '"a", ' * 3000 + '"a"',
            '```json\n{"id": 1, "items": ["a"]}\n```\n```json\n{}\n```',
        ),
        0.0,
    ),
    *_rows("json_schema", {"schema": NESTED}, {"answers": ["-"]}, ("[[], [[]]]", "[]"), 1.0),
    *_rows("json_schema", {"schema": NESTED}, {"answers": ["-"]}, ("[1]", "[" * 3000 + "]" * 3000, "[" * 8000 + "]" * 8000), 0.0),
    *_rows("json_schema", {"schema": {"pattern": "^(a+)+b$"}, "compare_s_max": 0.2}, {"answers": ["-"]}, (json.dumps("a" * 5000),), 0.0),
    *_rows("json_schema", {"schema": {"enum": [1, "a"]}}, {"answers": ["-"]}, ("1", "1.0", '"a"'), 1.0),
    *_rows("json_schema", {"schema": {"enum": [1, "a"]}}, {"answers": ["-"]}, ("true", '"1"', '["a"]', "null"), 0.0),
)  # fmt: skip

NGRAM = (
    *_rows("ngram", WHOLE, {"answers": ["the cat sat on the mat"]}, ("the cat sat on the mat", "The cat sat on the mat!"), 1.0),
    *_rows("ngram", WHOLE, {"answers": ["the cat sat on the mat"]}, ("the cat the mat",), 0.8),  # L = 4: 2 * 4 / (4 + 6)
    *_rows("ngram", WHOLE, {"answers": ["the cat sat on the mat"]}, ("the mat sat on the cat",), 8 / 12),  # the .. sat on the
    *_rows("ngram", WHOLE, {"answers": ["the cat sat on the mat", "a dog"]}, ("a dog",), 1.0),
    *_rows("ngram", WHOLE, {"answers": ["the cat sat on the mat"]}, ("", "!?", "dogs", "thecat"), 0.0),
    *_rows("ngram", WHOLE, {"answers": ["der Hund schl\u00e4ft", "\u732b"]}, ("Der Hund schl\u00e4ft.", "\u732b"), 1.0),
    *_rows("ngram", WHOLE, {"answers": ["a b"]}, ("a b " * 4000,), 4 / 8002),
    *_rows("ngram", WHOLE | {"form": "chrf"}, {"answers": ["abcd"]}, ("abcd", "ab cd", " abcd\n"), 1.0),
    *_rows("ngram", WHOLE | {"form": "chrf"}, {"answers": ["abcd"]}, ("", "xyz", "ABCD"), 0.0),
)  # fmt: skip

REPETITION = (
    *_rows("repetition", {}, {"answers": ["-"]}, ("", "a b", "a b c", "each word is here only once"), 0.0),
    *_rows("repetition", {}, {"answers": ["-"]}, ("a b c a b c",), -0.25),  # abc bca cab abc
    *_rows("repetition", {"form": "rate"}, {"answers": ["-"]}, ("a b c A B C",), 0.25),
    *_rows("repetition", {"form": "rate"}, {"answers": ["-"]}, ("no " * 102,), 0.99),
    *_rows("repetition", {"form": "rate", "n": 2, "unit": "characters"}, {"answers": ["-"]}, ("\u54c8\u54c8\u54c8", "\u54c8 \u54c8\n\u54c8"), 0.5),
)  # fmt: skip

TEXT_ROWS = (*CHOICE, *SQUAD, *REGEX, *JSON_SCHEMA, *NGRAM, *REPETITION)

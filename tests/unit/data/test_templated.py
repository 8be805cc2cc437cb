"""Templates: multiple choice and open questions from any file, what is dropped, and where the answers are."""

from __future__ import annotations

import json
import logging
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from rollmesh.mesh import MeshConfig
from rollmesh.mesh.mesh_services import reward_config
from rollmesh.services.data.checkable import is_checkable
from rollmesh.services.data.config import DataConfig, build_pools, build_selector
from rollmesh.services.data.metrics import DROPPED
from rollmesh.services.data.task import PoolTask, Split
from rollmesh.services.data.templated_source import TemplatedOptions, TemplatedSource
from rollmesh.services.reward.config import build_scorer
from rollmesh.services.reward.item import AnswerKey, TaskView
from rollmesh.services.reward.oracles import JsonlOracle, Oracles
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.domain.option_order import option_named
from rollmesh.shared.domain.trajectory import GroupContext, Reward
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.telemetry.metrics import Metric, use
from rollmesh.trainer.metrics import source_metrics

from ..reward import builders

LONG = "because light of short waves is scattered more by the air"
LINES: list[dict[str, Any]] = [
    {"question": "What is the capital of France?", "answer": "Paris"},
    {"question": "Which gas do plants take in?", "answer": "B", "options": ["oxygen", "carbon dioxide", "helium"]},
    {"question": "Which planet is red?", "answer": "Mars", "options": ["Mars", "Venus"]},
    {"question": "Which of the following is prime?", "answer": "7", "options": ["4", "7", "9"]},
    {"question": "Why is the sky blue?", "answer": LONG},
    {"question": "Who wrote it?", "answer": "Z", "options": ["Ann", "Bob"]},
    {"question": "What do plants need?", "answer": "A, B", "options": ["light", "water"]},
    {"question": "What is 6 * 7?", "answer": 42},
    {"question": "The capital again?", "answer": "paris"},
    {"question": "What is a half?", "answer": "1/2"},
    {"question": "Which country has 50 states?", "answer": "U.S."},
]
WHOLE = {"path": "q.jsonl", "options": "options", "validation_share": 0.0, "test_share": 0.0}
"""Options of the file, all of whose tasks are for training."""


def source(folder: Path, *, lines: list[dict[str, Any]] = LINES, **options: Any) -> TemplatedSource:
    (folder / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return TemplatedSource(options=config_from_dict(TemplatedOptions, {**WHOLE, **options}), base_dir=folder)


def key_of(folder: Path, task: PoolTask) -> AnswerKey:
    """Return the key that the reward service compares with."""
    chosen = {"name": "templated", "options": WHOLE}
    files = reward_config(config_from_dict(MeshConfig, {"data": {"source": chosen}})).answer_files
    jsonl = {"jsonl": JsonlOracle(files, folder)} if task.oracle_ref.startswith("jsonl:") else {}
    key = Oracles(jsonl).resolve(task.oracle_ref)
    assert key is not None
    return key


def answer(folder: Path, task: PoolTask) -> str:
    """Return the answer of the key."""
    return key_of(folder, task).answers[0]


def shown(task: PoolTask) -> dict[str, str]:
    """Return the options by letter."""
    lines = task.messages[0].content.split("\n\n")[1].split("\n")
    return {line[0]: line[3:] for line in lines}


async def right_and_wrong(
    scorer: Any, folder: Path, task: PoolTask, wrong: str, right: str = ""
) -> tuple[float, float]:
    """Return the rewards of a right answer, by default that of the key, and of a wrong one."""
    key = key_of(folder, task)
    found = []
    for said in (right or key.answers[0], wrong):
        given = replace(
            builders.item(f"I think <answer>{said}</answer>"), answer_key=key, task=TaskView(task_id=task.task_id)
        )
        reward = await scorer.score(given)
        assert isinstance(reward, Reward)
        found.append(reward.value)
    return found[0], found[1]


@pytest.mark.row("S053")
async def test_templates_convert_both_ways_and_drop_with_a_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All clauses. Open questions become multiple choice and back, and the scorer of the recipe accepts the answer of
    the question alone; a line whose answer no rule can check is dropped with its reason, in the log; the blend of the
    sources is the one that was set, and is in the metrics of a batch."""
    caplog.set_level(logging.INFO)
    choice = list(source(tmp_path, template="choice", num_options=3).tasks())
    by_line = {int(task.task_id.rpartition("-")[2]): task for task in choice}
    assert {line: shown(task)[answer(tmp_path, task)] for line, task in by_line.items()} == {
        1: "Paris", 2: "carbon dioxide", 3: "Mars", 4: "7", 5: LONG, 8: "42", 9: "paris", 10: "1/2", 11: "U.S.",
    }  # fmt: skip
    assert {line: len(shown(task)) for line, task in by_line.items()} == {
        1: 3,
        2: 3,
        3: 2,
        4: 3,
        5: 3,
        8: 3,
        9: 3,
        10: 3,
        11: 3,
    }
    assert "records dropped: source=questions not_an_option=2" in caplog.text

    opened = list(source(tmp_path, template="open").tasks())
    assert [(task.messages[0].content.split("\n\n")[0], answer(tmp_path, task)) for task in opened] == [
        ("What is the capital of France?", "Paris"),
        ("Which gas do plants take in?", "carbon dioxide"),
        ("Which planet is red?", "Mars"),
        ("What is 6 * 7?", "42"),
        ("The capital again?", "paris"),
        ("What is a half?", "1/2"),
    ]
    assert (
        "records dropped: source=questions answer_too_long=1 needs_options=1 not_an_option=2 not_checkable=1"
        in caplog.text
    )

    recipe = config_from_dict(MeshConfig, {"recipe": "crossthink"})
    scorer: Any = build_scorer(recipe.reward.scorers[0], None).scorer
    try:
        letters = {line: answer(tmp_path, task) for line, task in by_line.items()}
        others = {line: next(letter for letter in "AB" if letter != key) for line, key in letters.items()}
        for line in (1, 2):
            assert await right_and_wrong(scorer, tmp_path, by_line[line], others[line]) == (1.0, 0.0)
        said = [("paris", "Rome"), ("Carbon  dioxide", "oxygen"), ("mars", "Venus"), ("42.0", "41"), ("Paris", "Rome")]
        for task, (right, wrong) in zip(opened, [*said, ("0.5", "2")], strict=True):
            assert await right_and_wrong(scorer, tmp_path, task, wrong, right) == (1.0, 0.0)
    finally:
        await scorer.close()

    def entry(template: str) -> dict[str, Any]:
        return {"source": {"name": "templated", "options": {**WHOLE, "template": template}}}

    settings = {
        "source": {"name": "mixture", "options": {"sources": {"general": entry("choice"), "maths": entry("open")}}},
        "selector": msgspec.to_builtins(recipe.data.selector),
    }
    made = config_from_dict(DataConfig, settings)
    pool = build_pools(made, tmp_path)[Split.TRAIN]
    selector = build_selector(made, pool, tmp_path)
    batch = [pool.task(selector.draw(index, frozenset())) for index in range(15)]
    groups = [GroupContext(group="g", task=task.task_id, members=(), labels=task.labels) for task in batch]
    assert source_metrics(groups) == {
        "source/general/groups_share": pytest.approx(2 / 3),
        "source/maths/groups_share": pytest.approx(1 / 3),
    }


def test_a_constant_letter_is_right_in_1_of_k(tmp_path: Path) -> None:
    """400 questions of 4 options: the standard deviation of the rate is sqrt(0.25 * 0.75 / 400) = 0.022."""
    lines = [{"question": f"Question {n}?", "answer": f"answer {n}"} for n in range(400)]
    keys = Counter(answer(tmp_path, task) for task in source(tmp_path, lines=lines, template="choice").tasks())
    assert keys.keys() == set("ABCD")
    assert all(abs(num / 400 - 0.25) < 3 * 0.022 for num in keys.values()), keys


def test_as_given_asks_a_line_with_options_as_multiple_choice(tmp_path: Path) -> None:
    templates = {task.task_id: task.labels["template"] for task in source(tmp_path).tasks()}
    assert [templates.get(f"questions-{n}", "") for n in range(1, 10)] == [
        "open", "choice", "choice", "choice", "", "", "", "open", "open",
    ]  # fmt: skip


def test_other_answers_are_different_and_the_same_in_every_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    lines: list[dict[str, Any]] = [
        {"question": f"Question {n}?", "answer": text} for n, text in enumerate(("Paris", "paris", "Rome", "Oslo"))
    ]
    lines.append({"question": "Letter?", "answer": "B", "options": ["no", "yes"]})

    def tasks(num_options: int) -> list[PoolTask]:
        return list(source(tmp_path, lines=lines, template="choice", num_options=num_options).tasks())

    assert tasks(3) == tasks(3)
    for task in tasks(4)[:4]:
        assert {text.casefold() for text in shown(task).values()} == {"paris", "rome", "oslo", "yes"}
    assert not caplog.text
    assert [task.task_id for task in tasks(5)] == ["questions-5"]
    assert "records dropped: source=questions too_few_options=4" in caplog.text


def test_dropped_lines_are_counted_by_reason(tmp_path: Path) -> None:
    counted: Counter[str] = Counter()

    class Counting:
        def count(self, metric: Metric, node: str, labels: tuple[str, ...], amount: float) -> None:
            assert metric is DROPPED
            counted[labels[0]] += int(amount)

        def observe(self, metric: Metric, node: str, labels: tuple[str, ...], value: float) -> None:
            raise AssertionError("a counter is not observed")

    use(Counting())
    try:
        list(source(tmp_path, template="open").tasks())
    finally:
        use(None)
    assert counted == {"answer_too_long": 1, "needs_options": 1, "not_an_option": 2, "not_checkable": 1}


DROPPED_ANSWERS = (
    "Rock & roll", "U.S.", "i.e.", "Na+", "St. John's", '"Hamlet"', "C#", "{", "$", "?", "-", "#1", "1 & 2", "p -> q",
    "a/", "Tom", "cat", "DNA", "H2O", "Fe^{3+}", "A) Paris", "[1, 2", r"\frac{1}", "a_{i}_{j}", "sin x +", "3 and",
    "Yes, because it is even", "Dr. Who?",
)  # fmt: skip
KEPT_ANSWERS = (
    "Paris.", "carbon dioxide", "World War II", "Boeing 747", "self-esteem", "yes", "no", "A", "12:30 p.m.", "1914-1918",
    "1,000", "3 apples", "$5", "100%", "50 km/h", "1.5", "-3", "1/2", r"\frac{1}{2}", r"3\sqrt{2}", "x^2+1", "2xy",
    "(1, 2]", r"[0, \infty)", r"\text{Friday}", r"5\text{ cm}", "8, 7", "10^{-5}",
)  # fmt: skip


async def test_an_open_answer_is_kept_if_the_scorer_can_compare_it() -> None:
    assert [text for text in DROPPED_ANSWERS if is_checkable(text)] == []
    assert [text for text in KEPT_ANSWERS if not is_checkable(text)] == []
    recipe = config_from_dict(MeshConfig, {"recipe": "crossthink"})
    scorer: Any = build_scorer(recipe.reward.scorers[0], None).scorer
    try:
        for text in KEPT_ANSWERS:
            found = [
                (await scorer.score(builders.item(f"<answer>{said}</answer>", answer=text))).value
                for said in (f"**{text}**", "zebra")
            ]
            assert found == [1.0, 0.0], text
    finally:
        await scorer.close()


def test_texts_with_braces_stay_as_they_are(tmp_path: Path) -> None:
    lines = [{"question": "Is {options} a set?", "answer": "{prompt}", "options": ["{prompt}", "{0}"]}]
    (task,) = source(tmp_path, lines=lines, choice="{x} {prompt}\n\n{options}").tasks()
    assert task.messages[0].content.startswith("{x} Is {options} a set?\n\n")
    assert set(shown(task).values()) == {"{prompt}", "{0}"}


def test_the_split_of_a_question_is_the_same_for_each_template(tmp_path: Path) -> None:
    lines = [{"question": f"Question {n}?", "answer": str(n)} for n in range(60)]
    splits = [
        {t.task_id: t.split for t in source(tmp_path, lines=lines, template=template, test_share=0.5).tasks()}
        for template in ("choice", "open")
    ]
    assert splits[0] == splits[1]
    assert set(splits[0].values()) == {Split.TRAIN, Split.TEST}


@pytest.mark.parametrize(
    ("text", "place"),
    [("b", 1), ("(B)", 1), ("C.", 2), ("D", None), ("  X  y ", 0), ("z", None), ("a", 2), ("", None)],
)
def test_an_answer_names_an_option_by_its_text_first(text: str, place: int | None) -> None:
    assert option_named(text, ["x Y", "same", "A"]) == place


def test_an_option_that_is_there_twice_is_not_the_answer() -> None:
    assert option_named("x", ["x", "X", "y"]) is None


@pytest.mark.parametrize(
    ("answer", "options", "place"),
    [
        ("42", ["41", "42.0"], 1),
        ("1000", ["10", "1,000"], 1),
        ("0.5", ["2", "1/2"], 1),
        (r"$\frac{1}{2}$", ["2", "(B) .50"], None),
        (r"$\frac{1}{2}$", ["2", ".50"], 1),
        ("\u22123", ["3", "-3"], 1),
        ("A) 2.0", ["2", "3"], 0),
        ("0.5", ["1/2", ".5"], None),
        ("0.5", ["0.5", ".5"], 0),
        ("1/0", ["1/0", "0"], 0),
        ("50%", ["50", "0.5"], None),
        (".", ["0", "1"], None),
        ("1" * 41, ["0", "1"], None),
    ],
)
def test_an_answer_names_an_option_of_the_same_value(answer: str, options: list[str], place: int | None) -> None:
    assert option_named(answer, options) == place


def test_options_with_equal_values_are_one_option(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise a right answer could be counted as wrong, or a usable line would be dropped."""
    caplog.set_level(logging.INFO)
    lines: list[dict[str, Any]] = [
        {"question": "What is a half?", "answer": "0.5", "options": [0.5, "1/2", 2, 2.0]},
        {"question": "And a third?", "answer": "0.50", "options": [0.5, "1/2", 2, 2.0]},
        {"question": "How many?", "answer": 42, "options": ["42.0", "42"]},
        {"question": "Which one?", "answer": 7, "options": [6, "7.0"]},
    ]
    half, one = source(tmp_path, lines=lines).tasks()
    assert sorted(shown(half).values()) == ["0.5", "2"]
    assert shown(half)[answer(tmp_path, half)] == "0.5"
    assert shown(one)[answer(tmp_path, one)] == "7.0"
    assert "records dropped: source=questions equal_options=1 too_few_options=1" in caplog.text
    others = [{"question": f"Question {n}?", "answer": text} for n, text in enumerate(("1/2", "0.5", "1", "1.0"))]
    for task in source(tmp_path, lines=others, template="choice", num_options=2).tasks():
        assert len({Fraction(text) for text in shown(task).values()}) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"choice": "{prompt}"}, r"`choice` must contain \{options\}"),
        ({"open": "x"}, r"`open` must contain \{prompt\}"),
        ({"num_options": 11}, r"`num_options` must be in \[2, 10\]"),
        ({"template": "both"}, "`template` must be one of as_given, choice, open"),
        ({"test_share": 0.6, "validation_share": 0.4}, "`validation_share` must be < 1 - test_share"),
    ],
)
def test_a_wrong_option_is_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        source(tmp_path, **options)


def test_lines_that_cannot_be_used_are_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    lines: list[dict[str, Any]] = [
        {"question": "a?", "answer": "x", "options": {"A": "x"}},
        {"question": "c?", "answer": "C", "options": ["oak", "elm", "all of the above"]},
        {"question": "d?", "answer": "Both A and B", "options": ["oak", "elm", "Both A and B"]},
        {"question": "What is the sum of these numbers?", "answer": "30", "options": []},
        {"question": "e?", "answer": 2, "options": [1, 2.5, 2]},
    ]
    opened = list(source(tmp_path, lines=lines, template="open").tasks())
    assert [answer(tmp_path, task) for task in opened] == ["30", "2"]
    counts = "malformed_options=1 refers_to_options=2"
    assert f"records dropped: source=questions {counts}" in caplog.text


@pytest.mark.parametrize("named", ["B", "B) Rome", "Rome"])
def test_letters_of_the_file_are_removed_from_options(tmp_path: Path, named: str) -> None:
    lines = [{"question": "Capital of Italy?", "answer": named, "options": ["A) Paris", "B) Rome"]}]
    (choice,) = source(tmp_path, lines=lines, template="choice").tasks()
    assert shown(choice)[answer(tmp_path, choice)] == "Rome"
    (opened,) = source(tmp_path, lines=lines, template="open").tasks()
    assert answer(tmp_path, opened) == "Rome"

"""Labels of all tasks of a pool at once, and categories that a process finds once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.services.data import labels, mixture_pool, task_scan
from rollmesh.services.data.files_source import FilePool
from rollmesh.services.data.labels import categories_of, read_labels
from rollmesh.services.data.mixture_pool import MixturePart, MixturePool
from rollmesh.services.data.pool import MemoryPool
from rollmesh.services.data.selector import SELECTORS
from rollmesh.services.data.selectors import shares
from rollmesh.services.data.selectors.shares import SHARE_MIN
from rollmesh.services.data.source import SOURCES
from rollmesh.services.data.subpool import SubPool
from rollmesh.services.data.task import Split, TaskPool
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.errors import ConfigError

from .builders import leveled, pool


def of_files(folder: Path, num_tasks: int = 9) -> FilePool:
    """Return a pool of files with the label `level`, a number, and `text`, which differs for each task."""
    lines = [json.dumps({"question": f"{n}?", "answer": "1", "level": n % 4}) + "\n" for n in range(num_tasks)]
    (folder / "a.jsonl").write_text("".join(lines))
    options = {
        "path": "a.jsonl",
        "labels": {"level": "level", "text": "question"},
        "test_share": 0,
        "validation_share": 0,
    }
    found: FilePool = SOURCES.make(Extension("files", options), folder, base_dir=folder).pools()[Split.TRAIN]
    return found


def of_all_kinds(folder: Path) -> dict[str, TaskPool]:
    parts = {"a": of_files(folder), "b": leveled("x", "3"), "c": MemoryPool(()), "d": pool(7)}
    mixture = MixturePool([MixturePart(source=name, pool=one) for name, one in parts.items()])
    some = SubPool(mixture, np.array([0, 1, 4, 5, 17]))
    return {**parts, "mixture": mixture, "some": some, "nested": SubPool(some, np.array([1, 4]))}


@pytest.mark.parametrize("kind", ["a", "b", "c", "d", "mixture", "some", "nested"])
def test_labels_of_all_tasks_are_those_of_each_task(tmp_path: Path, kind: str) -> None:
    chosen = of_all_kinds(tmp_path)[kind]
    for name in ("level", "text", "source", "missing"):
        found = read_labels(chosen, name)
        each = [chosen.label(position, name) for position in range(len(chosen))]
        assert [found.value(position) for position in range(len(chosen))] == each
        categories = categories_of(chosen, name)
        assert categories.names == tuple(sorted(set(each)))
        assert [categories.names[code] for code in categories.of_task] == each
        assert [part.tolist() for part in categories.tasks] == [
            [position for position, value in enumerate(each) if value == name] for name in categories.names
        ]


def test_labels_of_files_are_not_read_task_by_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop over 10^7 tasks blocks every call of the service."""
    mixture = of_all_kinds(tmp_path)["mixture"]
    monkeypatch.delattr(FilePool, "label")
    monkeypatch.delattr(MixturePool, "label")
    assert set(categories_of(mixture, "level").names) == {"0", "1", "2", "3", "x"}
    assert categories_of(mixture, mixture_pool.SOURCE_LABEL).names == ("a", "b", "d")


def test_a_label_of_too_many_values_names_the_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_scan, "LABEL_VALUES_MAX", 4)
    mixture = MixturePool([MixturePart(source="a", pool=of_files(tmp_path))])
    for found in (mixture, SubPool(mixture, np.arange(2))):
        with pytest.raises(ConfigError, match="the label `text` of the source `tasks` has more than"):
            categories_of(found, "text")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mixture", {"weights": {"a": [{"draw": 0, "weight": 1}, {"draw": 99, "weight": 5 * SHARE_MIN}], "d": 1}}),
        ("mixture", {"weights": {"a": 1, "d": 1}, "selector": {"name": "sec"}}),
        ("sec", {}),
        ("thompson", {}),
    ],
)
def test_a_further_run_reads_no_labels_and_makes_no_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    """The service makes the first selector when it starts. Each further one, of another run, is made by a call."""
    kinds = of_all_kinds(tmp_path)
    tasks = MixturePool([MixturePart(source=one, pool=kinds[one]) for one in ("a", "d")])
    first = SELECTORS.make(Extension(name, options), pool=tasks, seed=1)
    monkeypatch.setattr(labels, "read_labels", pytest.fail)
    monkeypatch.setattr(shares, "in_proportion", pytest.fail)
    second = SELECTORS.make(Extension(name, options), pool=tasks, seed=1)
    assert [second.draw(n, frozenset()) for n in range(300)] == [first.draw(n, frozenset()) for n in range(300)]

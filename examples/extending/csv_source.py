"""A task source: prompts from a CSV file with the columns prompt, topic and split."""

import csv

import msgspec

from rollmesh.services.data.source import TaskSource
from rollmesh.services.data.task import PoolTask, Split
from rollmesh.shared.domain.trajectory import Message


class CsvOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str


class CsvSource(TaskSource):
    Options = CsvOptions

    def __init__(self, *, base_dir, options):
        self.path = base_dir / options.path

    def tasks(self):
        with self.path.open(newline="", encoding="utf-8") as file:
            for number, row in enumerate(csv.DictReader(file)):
                yield PoolTask(
                    task_id=f"csv-{number}",
                    messages=(Message(role="user", content=row["prompt"]),),
                    labels={"topic": row["topic"]},
                    split=Split(row["split"]),
                )

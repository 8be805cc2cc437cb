"""A query the model wrote, judged by its result: 1 if it answers as the exemplary one on every hidden database, else 0; and the share.

The query becomes a file beside a runner that makes the database, lets the query read and returns its rows; both run in the
candidate's jail, where no expected row ever is. The order of rows counts where the question asks for one.

Source: distilled test suites, Zhong et al. 2020: one database lets too many wrong queries pass.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from rollmesh.services.reward.scorers.tests import TestsOptions, TestsScorer

QUERY_PATH = "query.sql"

RUNNER = f"""\
import os
import sqlite3


def run(script, ordered):
    with open(os.path.join(os.path.dirname(__file__), {QUERY_PATH!r}), encoding="utf-8") as file:
        query = file.read()
    database = sqlite3.connect(":memory:")
    database.executescript(script)
    database.execute("pragma query_only = on")
    rows = [list(row) for row in database.execute(query)]
    return rows if ordered else sorted(rows, key=repr)
"""


class QueryOptions(TestsOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the query scorer."""

    pattern: str = ""
    """Regular expression that finds the query: the last match counts, group 1 if it has one. Empty = the whole text."""


class QueryScorer(TestsScorer):
    """See the module. Without hidden databases in the answer key it does not apply."""

    Options: ClassVar[type[msgspec.Struct]] = QueryOptions
    version: ClassVar[str] = "1"

    def files(self, code: str) -> dict[str, bytes]:
        return {self._options.path: RUNNER.encode(), QUERY_PATH: code.encode("utf-8", "replace")}

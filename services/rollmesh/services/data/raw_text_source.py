"""A source of raw text: the prompt of a task is the beginning of a passage, and the policy continues it.

The passage is cut before the first word that begins at `prefix_share` of its length or later, and before the white
space in front of it, which tokens of a word usually contain. The prompt has the text before the cut, as the content of
one message; an agent that reads raw text, such as `continuation`, gives it to the model without a chat template. The
private extras `original` and, if `rewriter` names an endpoint, `rewritten` have the text after the cut and another
version of it, both with the white space at their start. A rewritten text that is empty or equal to the original is
null.

Source: Self-Improving Pretraining (2026-01, arXiv:2601.21343; no public code): candidates for the next tokens of a
document are its own suffix, a suffix that a strong model rewrote, and samples of the policy. The prompt of the rewriter
is the project's own; in the paper the rewriter is itself trained.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from rollmesh.services.data.asking import AskingSource
from rollmesh.services.data.passages import PassageOptions, passages
from rollmesh.services.data.task import PoolTask
from rollmesh.shared.domain.trajectory import Message

REWRITE = """\
A text begins as follows.

{prefix}

Its continuation is:

{suffix}

Rewrite the continuation so that it is of high quality, safe and factual. Keep what is so already, and its style and length.
Return the continuation only."""  # noqa: E501
ORIGINAL, REWRITTEN = "original", "rewritten"
_WORD = re.compile(r"(?<=\s)\S")


class RawTextOptions(PassageOptions):
    """Settings of the source of raw text."""

    prefix_share: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    """Share of the characters of a passage that are the prompt, at least."""
    rewriter: str = ""
    """Endpoint that rewrites the rest of the passage. Empty: the rewritten text of each task is null."""


class RawTextSource(AskingSource):
    """See the module."""

    Options = RawTextOptions

    def __init__(self, *, options: RawTextOptions, base_dir: str | Path | None = None) -> None:
        self._options, self._base_dir = options, base_dir

    def tasks(self) -> Iterator[PoolTask]:
        """Yield the tasks. Raise as `passages`, and as `AsksBlocking.ask`."""
        options = self._options
        for passage in passages(options, self._base_dir):
            cut = _WORD.search(passage.text, int(options.prefix_share * len(passage.text)))
            if cut is None:
                continue  # no word begins after the share
            prefix, suffix = passage.text[: cut.start()].rstrip(), passage.text[cut.start() :]
            space = passage.text[len(prefix) : cut.start()]
            given: dict[str, str | None] = {ORIGINAL: space + suffix, REWRITTEN: None}
            if options.rewriter:
                rewritten = self.ask(options.rewriter, REWRITE.format(prefix=prefix, suffix=suffix))
                given[REWRITTEN] = space + rewritten if rewritten not in ("", suffix) else None
            yield PoolTask(
                task_id=f"{options.name}-{passage.number}",
                messages=(Message(role="user", content=prefix),),
                private_extras=given,
                split=passage.split,
            )

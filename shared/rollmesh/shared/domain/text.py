"""Word forms for messages, and elements such as <answer> in texts of models."""

from __future__ import annotations

from collections.abc import Mapping

LABEL_CHARS_MAX = 64
"""Greatest length of the value of a label that groups tasks, in characters. A longer one is a text for the agent."""


def short_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels that group tasks: those whose values have at most `LABEL_CHARS_MAX` characters."""
    return {label: value for label, value in labels.items() if len(value) <= LABEL_CHARS_MAX}


def count_of(num: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: "1 blob", "2,000 blobs"."""
    return f"{num:,} {noun}" if num == 1 else f"{num:,} {plural or noun + 's'}"


def elements(text: str, tag: str) -> list[str]:
    """Return the contents of the elements `<tag>...</tag>` of a text, in order, each up to its first end tag.

    It takes linear time, also for a text with many start tags and no end tag, which a regular expression searches to
    the end from each of them.
    """
    begin, end = f"<{tag}>", f"</{tag}>"
    found, at = [], 0
    while (start := text.find(begin, at)) >= 0 and (stop := text.find(end, start)) >= 0:
        found.append(text[start + len(begin) : stop])
        at = stop + len(end)
    return found

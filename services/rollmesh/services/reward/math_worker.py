"""A process that compares mathematical answers (`worker_loop`).

The key of a request is `{"answers": [...]}`, the reply `{"equal": bool, "understood": "..."}`. A comparison repeats
work on the key, so the text may take the CPU time of the key in addition. An error is one of the key: what cannot be
parsed or compared in the text is a wrong answer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rollmesh.services.reward import math_text
from rollmesh.services.reward.worker_loop import serve

UNDERSTOOD_CHARS_MAX = 1000
"""Maximum characters of `understood`, so that a reply fits into a line that the pool reads."""
_KEYS_MAX = 256
"""Keys that a worker remembers."""


def main() -> None:
    serve(Comparer)


@dataclass(frozen=True, slots=True)
class Key:
    """The accepted answers of a task."""

    values: tuple[tuple[str, Any], ...]
    """Each answer with its sympy object, which is None if the answer is compared as text."""
    error: str
    """Why no answer can be compared with the key, or empty."""
    cpu_s: float
    """CPU time that reading the key and one comparison with it took."""


class Comparer:
    """Compares by choice, words, time of day or base if the key is of this kind, and else by value through
    math-verify."""

    def __init__(self) -> None:
        import math_verify
        import sympy
        from latex2sympy2_extended.math_normalization import NormalizationConfig, extract_boxed_content

        normalization = NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
        )
        self._math_verify: Any = math_verify
        self._i = sympy.I
        self._latex = [math_verify.LatexExtractionConfig(normalization_config=normalization)]
        self._boxed = extract_boxed_content
        self._zero = sympy.Integer(0)
        self.key = lru_cache(maxsize=_KEYS_MAX)(self._key)

    def read(self, request: Mapping[str, Any]) -> Key:
        return self.key(tuple(request["answers"]))

    def reply(self, key: Key, text: str) -> dict[str, Any]:
        if key.error:
            return {"error": key.error}
        try:
            said = self._answer_in(text)
            equal = any(self._equal(*accepted, said, text) for accepted in key.values)
            return {"equal": equal, "understood": (math_text.latex(said) or said)[:UNDERSTOOD_CHARS_MAX]}
        except Exception:  # noqa: BLE001 - sympy and its parser raise anything; the model chose the text
            return {"equal": False, "understood": ""}

    def _key(self, answers: tuple[str, ...]) -> Key:
        begun, values = time.process_time(), []
        for answer in map(self._answer_in, answers):
            value, error = self._read(answer)
            if error:
                return Key((), error, 0.0)
            values.append((answer, value))
        return Key(tuple(values), "", time.process_time() - begun)

    def _answer_in(self, text: str) -> str:
        return math_text.answer_in(str(self._boxed(text, mode="last")))

    def _read(self, key: str) -> tuple[Any, str]:
        """Return the sympy object of an accepted answer, and why no answer can be compared with it, or ""."""
        if math_text.choice_key(key) or math_text.words(key) or math_text.clock(key) or math_text.based(key):
            return None, ""
        try:
            value = self._value(math_text.latex(key))
            if value is None:
                return None, "an accepted answer of the key is not a mathematical expression"
            self._verify(value, 0)
        except Exception as error:  # noqa: BLE001 - as above
            return None, f"an accepted answer of the key cannot be compared ({type(error).__name__})"
        with suppress(Exception):  # only its time matters: sympy cannot compare some values with a number
            self._verify(value, self._zero)
        return value, ""

    def _equal(self, key: str, value: Any, said: str, message: str) -> bool:
        if letter := math_text.choice_key(key):
            return math_text.choice(said) == letter
        if named := math_text.words(key):
            return math_text.words(said) == named
        if clock := math_text.clock(key):
            given = math_text.clock(said)
            return given is not None and given[0] == clock[0] and (not given[1] or not clock[1] or given[1] == clock[1])
        if number := math_text.based(key):
            return (math_text.based(said) or (said.upper(), number[1])) == number
        letter_units = not math_text.has_letters(math_text.latex(key))
        found = self._value(math_text.latex(said, letter_units=letter_units))
        if found is None and math_text.is_prose(said) and not math_text.leaves_open(said):
            found = self._last_value(message)
        return found is not None and self._verify(value, found)

    def _value(self, latex: str) -> Any:
        """Return the sympy object of the whole text, or None."""
        if not latex:
            return None
        found = self._math_verify.parse(f"${latex}$", self._latex, parsing_timeout=None, raise_on_error=True)
        value: Any = next((part for part in found if not isinstance(part, str)), None)
        letters = {} if value is None else {symbol: self._i for symbol in value.free_symbols if symbol.name == "i"}
        return value.subs(letters) if letters else value

    def _last_value(self, message: str) -> Any:
        """Return the value that math-verify finds in a message: LaTeX between delimiters, then the last number."""
        found = self._math_verify.parse(message, parsing_timeout=None, raise_on_error=True)
        return next((part for part in found if not isinstance(part, str)), None)

    def _verify(self, wanted: Any, found: Any) -> bool:
        equal = self._math_verify.verify(
            wanted, found, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True
        )
        return bool(equal)


if __name__ == "__main__":
    main()

"""The errors of decoding bytes that may be damaged, or may come from another program."""

from __future__ import annotations

from typing import Final

import msgspec

UNDECODABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Raised by msgspec for another structure, for a string that is not UTF-8, and for too many nested values."""

"""What a run has spent at one endpoint: a number in a file that the processes of the run folder share under a lock."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollmesh.shared.errors import EndpointFailed, PriceLimit

_DIGITS = 64
"""Bytes that are read of the file."""


class EndpointSpending:
    """The sum of the prices. It survives a restart of the run."""

    def __init__(self, endpoint: str, folder: Path | None) -> None:
        """Without a `folder`, the sum is that of this process."""
        self._endpoint = endpoint
        self._path = folder / f"{endpoint}.spent" if folder is not None else None
        self._sum = 0.0

    def check(self, price_max: float) -> None:
        """Raise PriceLimit if the limit is reached. 0: no limit."""
        if price_max and (spent := self.add(0.0)) >= price_max:
            raise PriceLimit(
                f"the run has spent {spent:g} of `price_max` = {price_max:g}; raise it and resume the run",
                endpoint=self._endpoint,
            )

    def add(self, price: float) -> float:
        """Add a price and return the sum. Raises EndpointFailed if the file cannot be used."""
        if self._path is None:
            self._sum += price
            return self._sum
        try:
            with _locked(self._path) as file:
                spent = float(os.pread(file, _DIGITS, 0) or b"0") + price
                if price:
                    os.pwrite(file, repr(spent).encode().ljust(_DIGITS), 0)
                return spent
        except (OSError, ValueError) as err:
            raise EndpointFailed(f"cannot count the price in {self._path}: {err}", endpoint=self._endpoint) from err


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Open a file for reading and writing while no other process has it open here. The lock is held for
    microseconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(file)

"""The extra of this package that contains a missing library, for errors that name the remedy.

The extras are those of the package's metadata, so that there is one list of them, in pyproject.toml.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

from rollmesh.shared.errors import ConfigError


def install_hint(module: str | None) -> str:
    """Return the command that installs the library of a module; empty if no extra contains it."""
    library = (module or "").partition(".")[0]
    for requirement in metadata.requires("rollmesh") or ():
        found = re.match(r"""([\w.-]+).*;.*\bextra == ['"](\w+)['"]""", requirement)
        if found and found[1].replace("-", "_") == library:
            return f"pip install 'rollmesh[{found[2]}]'"
    return ""


@contextmanager
def libraries_needed(part: str) -> Iterator[None]:
    """Raise ConfigError with the remedy if `part` needs a library of an extra that is not installed. Other errors pass
    unchanged."""
    try:
        yield
    except ModuleNotFoundError as err:
        if not (remedy := install_hint(err.name)):
            raise
        raise ConfigError(f"{part} needs the library `{err.name}`, which is not installed: {remedy}") from err

"""The language port: languages that the operator adds to those of the sandbox runtime.

A language is a declaration of commands. The service resolves it, the zygotes get it as data, and the commands run in
the jail, so that code of the extension runs only in the service.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from rollmesh.sandbox_runtime.languages.programs import Command
from rollmesh.sandbox_runtime.languages.registry import BUILT_IN
from rollmesh.shared.config.plugin import Plugin, required
from rollmesh.shared.config.registry import Extension, Registry
from rollmesh.shared.config.settings import Settings
from rollmesh.shared.errors import ConfigError


class SandboxLanguage(Plugin):
    """Base of declarations of a language. Constructed as `cls(options=...)`, or as `cls()` if the class has no
    `Options`."""

    @required
    def command(self) -> Command:
        """Return how a source file is built and run."""
        raise NotImplementedError


class CommandOptions(Settings):
    """Settings of `command`. In an argument, `{folder}` stands for the directory that contains the source."""

    source: Annotated[str, Meta(pattern="^[^/]+$")]
    """Name of the source file, for example main.lua."""
    run: Annotated[tuple[str, ...], Meta(min_length=1)]
    """Command that runs the program, in the directory of the session, for example [lua, "{folder}/main.lua"]."""
    build: tuple[str, ...] = ()
    """Command that builds the program, in the directory of the source. Empty if there is nothing to build."""
    full_address_space: bool = False
    """Whether the program gets all the address space of the profile, which some runtimes reserve at their start."""


class DeclaredLanguage(SandboxLanguage):
    """A language that the configuration declares."""

    Options = CommandOptions

    def __init__(self, *, options: CommandOptions) -> None:
        self._options = options

    def command(self) -> Command:
        return Command(**msgspec.structs.asdict(self._options))


LANGUAGES = Registry(
    "sandbox language", {"command": "rollmesh.services.sandbox.languages:DeclaredLanguage"}, SandboxLanguage
)


def declared_commands(languages: Mapping[str, Extension]) -> dict[str, Command]:
    """Return the command of each language in `sandbox.languages`. Raise ConfigError."""
    for name in languages:
        if name in BUILT_IN:
            raise ConfigError(f"`sandbox.languages.{name}`: {name!r} is a language of the sandbox; choose another name")
    return {name: LANGUAGES.make(chosen).command() for name, chosen in languages.items()}

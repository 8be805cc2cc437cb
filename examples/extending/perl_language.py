"""A sandbox language: Perl with the interpreter of the host."""

import msgspec

from rollmesh.sandbox_runtime.languages.programs import Command
from rollmesh.services.sandbox.languages import SandboxLanguage


class PerlOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    warnings: bool = True


class Perl(SandboxLanguage):
    Options = PerlOptions

    def __init__(self, *, options):
        self.flags = ("-w",) if options.warnings else ()

    def command(self):
        return Command(source="main.pl", run=("perl", *self.flags, "{folder}/main.pl"))

"""A sandbox engine: the jail, with a record of each program that ran in it."""

import json

import msgspec

from rollmesh.services.sandbox.engines.jail_engine import JailEngine


class RecordedOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    file: str = "programs.jsonl"


class RecordedEngine(JailEngine):
    Options = RecordedOptions

    def __init__(self, *, config, state_dir, ids, clock, options):
        super().__init__(config, state_dir=state_dir, ids=ids, clock=clock)
        self.record = state_dir / options.file

    async def run(self, session_id, program, wall_s, on_output=None):
        result = await super().run(session_id, program, wall_s, on_output)
        line = {"session": session_id, "code": program.code, "outcome": result.outcome.name}
        with self.record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return result

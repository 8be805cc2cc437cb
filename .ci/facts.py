"""Generate the coordinator's `core/facts.py`: a frozen record for each message and enum that `Fact` of events.proto reaches.

The core must not depend on protobuf, so it has records with the names, fields and comments of the messages.
Usage: `facts.py DESCRIPTOR_SET OUTPUT`. The descriptor set must include source info.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorSet

ELSEWHERE = {
    "Record": "rollmesh.services.coordinator.core.records",
    "RunSpec": "rollmesh.services.coordinator.core.records",
    "PolicyVersion": "rollmesh.shared.domain.versions",
}
"""Types that are written by hand, because they have rules, and their modules."""
ZERO_MEMBERS = {"SampleEnd": "LIVE", "FinishReason": "UNFINISHED"}
"""Names of the number 0 of enums where it is a value. No record holds the number 0 of another enum."""
TRUE_BY_DEFAULT = {"SampleMeta.trainable", "UpdateCommitted.applied"}
IDENTITIES = {"group", "episode", "lease_id"}
"""Fields that a fact requires. It also requires its enums and the types of `ELSEWHERE`."""
SCALARS = {
    FieldDescriptorProto.TYPE_STRING: ("str", '""'),
    FieldDescriptorProto.TYPE_BOOL: ("bool", "False"),
    FieldDescriptorProto.TYPE_DOUBLE: ("float", "0.0"),
    FieldDescriptorProto.TYPE_INT32: ("int", "0"),
    FieldDescriptorProto.TYPE_INT64: ("int", "0"),
    FieldDescriptorProto.TYPE_UINT64: ("int", "0"),
}


class Generator:
    def __init__(self, files: FileDescriptorSet) -> None:
        self._types: dict[str, DescriptorProto | EnumDescriptorProto] = {}
        self._comments: dict[str, str] = {}
        for file in files.file:
            comments = {tuple(location.path): location.leading_comments for location in file.source_code_info.location}
            for number, types in ((4, file.message_type), (5, file.enum_type)):
                for index, type_ in enumerate(types):
                    self._types[type_.name] = type_
                    self._comments[type_.name] = " ".join(comments.get((number, index), "").split())
        self._classes: dict[str, str] = {}
        """Source text by name, in an order in which the classes can be declared."""

    def module(self) -> str:
        facts = [_type_name(field) for field in self._types["Fact"].field]
        for name in facts:
            self._declare(name, "tag=True")
        imports = [
            f"from {module} import {', '.join(n for n in ELSEWHERE if ELSEWHERE[n] == module)}"
            for module in sorted(set(ELSEWHERE.values()))
        ]
        head = '"""The facts of the ledger and the values in them. Generated from events.proto by .ci/facts.py; do not edit."""'
        futures = "from __future__ import annotations\n\nfrom enum import IntEnum\n\nimport msgspec"
        union = "Fact = (\n    " + "\n    | ".join(facts) + "\n)"
        return (
            "\n\n".join([head, futures, "\n".join(imports)])
            + "\n\n\n"
            + "\n\n\n".join([*self._classes.values(), union])
            + "\n"
        )

    def _declare(self, name: str, parameters: str = "omit_defaults=True") -> None:
        if name in ELSEWHERE or name in self._classes:
            return
        type_ = self._types[name]
        if isinstance(type_, EnumDescriptorProto):
            head, body = f"class {name}(IntEnum):", _members(type_)
        else:
            head = f"class {name}(Record, frozen=True, kw_only=True, {parameters}):"
            body = [self._field(type_, field, parameters == "tag=True") for field in type_.field]
        doc = textwrap.wrap(f'"""{self._comments[name]}"""', 116)
        self._classes[name] = "\n    ".join([head, *doc, "\n    ".join(["", *body])]).replace("\n    \n", "\n\n")

    def _field(self, message: DescriptorProto, field: FieldDescriptorProto, is_fact: bool) -> str:
        type_, default = SCALARS.get(field.type, ("", ""))
        if any(nested.options.map_entry for nested in message.nested_type if nested.name == _type_name(field)):
            return f"{field.name}: dict[str, str] = msgspec.field(default_factory=dict)"
        if not type_:
            type_ = _type_name(field)
            self._declare(type_)
            of_enum = isinstance(self._types[type_], EnumDescriptorProto)
            default = f"{type_}.{_members(self._types[type_])[0].split()[0]}" if of_enum else f"{type_}()"
        if field.label == FieldDescriptorProto.LABEL_REPEATED:
            return f"{field.name}: tuple[{type_}, ...] = ()"
        if f"{message.name}.{field.name}" in TRUE_BY_DEFAULT:
            default = "True"
        required = is_fact and (field.name in IDENTITIES or type_ in ELSEWHERE or default.startswith(f"{type_}."))
        return f"{field.name}: {type_}" + ("" if required else f" = {default}")


def _type_name(field: FieldDescriptorProto) -> str:
    return field.type_name.rpartition(".")[2]


def _members(enum: EnumDescriptorProto) -> list[str]:
    """`NAME = number` for each value, without the prefix of the enum."""
    prefix = len(enum.value[0].name.removesuffix("UNSPECIFIED"))
    zero = [f"{ZERO_MEMBERS[enum.name]} = 0"] if enum.name in ZERO_MEMBERS else []
    return zero + [f"{value.name[prefix:]} = {value.number}" for value in enum.value if value.number]


if __name__ == "__main__":
    files = FileDescriptorSet.FromString(Path(sys.argv[1]).read_bytes())
    Path(sys.argv[2]).write_text(Generator(files).module())

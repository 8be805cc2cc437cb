"""The contract states the ranges that the fields of `RunSpec` declare."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
from msgspec import inspect

from rollmesh.services.coordinator.core.records import RunSpec
from rollmesh.shared.config.settings import plain

PROTO = Path(__file__).parents[3] / "protos/rollmesh/v1/events.proto"
ELSEWHERE = {"publish_every", "success_target"}
"""Fields whose ranges the contract gives with reference to another field, or at the field."""


def test_the_contract_states_the_declared_ranges() -> None:
    before = PROTO.read_text().partition("\nmessage RunSpec {")[0]
    comment = " ".join(re.findall(r"// ?(.*)", before[before.rindex("\n\n") :]))
    stated = {
        name: (float(least), float(most))
        for names, least, most in re.findall(r"((?:\w+, )*\w+) ([\d.]+) to ([\d.e]+)(?![\d.e])", comment)
        for name in names.split(", ")
    }
    declared = {}
    for field in msgspec.structs.fields(RunSpec):
        node = plain(inspect.type_info(field.type))
        if isinstance(node, inspect.IntType | inspect.FloatType) and node.ge is not None and node.le is not None:
            declared[field.name] = (float(node.ge), float(node.le))
    assert len(declared) > 15
    assert {name: limits for name, limits in stated.items() if name not in ELSEWHERE} == {
        name: limits for name, limits in declared.items() if name not in ELSEWHERE
    }


def test_the_contract_states_the_longest_names() -> None:
    lengths = {
        field.name: node.max_length
        for field in msgspec.structs.fields(RunSpec)
        if isinstance(node := plain(inspect.type_info(field.type)), inspect.StrType) and node.max_length is not None
    }
    assert set(lengths.values()) == {64}
    assert "policy, learner, eval_split, export_split and success_reward at most 64 characters" in PROTO.read_text()
    assert set(lengths) == {"policy", "learner", "eval_split", "export_split", "success_reward"}

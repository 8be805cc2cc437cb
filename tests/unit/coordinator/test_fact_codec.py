"""Facts survive encoding, and the records that are written by hand agree with their messages."""

from __future__ import annotations

import types
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.services.coordinator import fact_codec
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core import records
from rollmesh.services.coordinator.core.apply import apply
from rollmesh.services.coordinator.core.state import State
from rollmesh.shared.config.settings import SettingError, plain
from rollmesh.shared.domain.formats import NewerFormat
from rollmesh.shared.domain.ledger_head import RECORD_FORMAT
from rollmesh.shared.domain.plans import SamplingOverrides, Variant
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import InvalidInput
from rollmesh.v1 import events_pb2, run_pb2, types_pb2

from .core_run import CoreRun

FACTS = typing.get_args(f.Fact)
HAND_WRITTEN: dict[type, Any] = {
    PolicyVersion: types_pb2.PolicyVersion,
    records.RunSpec: events_pb2.RunSpec,
    records.ReplaySpec: events_pb2.ReplaySpec,
}
INTEGERS = {"segment": st.integers(-(2**31), 2**31 - 1), "leaf": st.integers(-(2**31), 2**31 - 1)}


def strategy(hint: Any, name: str = "") -> st.SearchStrategy[Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return st.lists(strategy(args[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(strategy(args[0]), strategy(args[1]), max_size=3)
    if origin in (types.UnionType, typing.Union):
        return strategy(args[0])
    if hint is str:
        return st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    if hint is bytes:
        return st.binary(max_size=8)
    if hint is bool:
        return st.booleans()
    if hint is float:
        return st.floats(allow_nan=False)
    if hint is int:
        return INTEGERS.get(name, st.integers(0, 2**63 - 1))
    if origin is typing.Literal:
        return st.sampled_from(args)
    if hint is records.RunSpec:
        return run_specs()
    if hint is records.ReplaySpec:
        return replay_specs()
    if hint is records.ForeignSource:  # a share of 1 is valid for every size of a batch
        ages = st.one_of(st.integers(0, 10**6), st.just(records.UNLIMITED))
        return st.builds(hint, source=strategy(records.SubmittedSource), max_age=ages, share=st.just(1.0))
    if hint is Variant:
        return variants("v")
    if issubclass(hint, (records.Record, PolicyVersion)):
        return st.builds(hint, **{n: strategy(h, n) for n, h in typing.get_type_hints(hint).items()})
    return st.sampled_from(list(hint))


def variants(name: str) -> st.SearchStrategy[Variant]:
    json = st.none() | st.booleans() | st.integers(-9, 9) | st.lists(st.text("ab", max_size=3), max_size=2)
    return st.builds(
        Variant,
        name=st.just(name),
        sampling=st.builds(
            SamplingOverrides, temperature=st.none() | st.floats(0, 10), top_k=st.none() | st.integers(0, 9)
        ),
        prefix=st.text("ab\n", max_size=3),
        hint_extra=st.sampled_from(["", "solution"]),
        options=st.dictionaries(st.text("ab", min_size=1, max_size=3), json, max_size=2),
        seed=st.none() | st.integers(0, 2**63 - 1),
    )


def run_specs() -> st.SearchStrategy[records.RunSpec]:
    names = typing.get_type_hints(records.RunSpec)
    fields = {name: strategy(hint, name) for name, hint in names.items()}
    for field in msgspec.structs.fields(records.RunSpec):
        node = plain(msgspec.inspect.type_info(field.type))
        if isinstance(node, msgspec.inspect.IntType) and node.le is not None:
            fields[field.name] = st.integers(node.ge, node.le)
        elif isinstance(node, msgspec.inspect.FloatType):
            fields[field.name] = st.floats(node.ge, node.le)
    fields |= {name: st.integers(1, 50) for name in ("batch_groups", "group_size", "max_staleness")}
    fields |= {"batch_groups": st.integers(2, 50), "replay": st.none() | replay_specs()}
    fields |= {"variants": st.just(())}
    fields |= {"publish_every": st.just(1), "success_target": st.just(0.0)}
    fields["eval_tasks"] = st.integers(1, 1000)
    one_source = st.lists(strategy(records.ForeignSource), max_size=1).map(tuple)
    trains = fields | {"export_groups": st.just(0), "foreign": one_source}
    trains["external_sources"] = st.just(typing.get_args(records.SubmittedSource))
    succeeds = trains | {"eval_every": st.integers(1, 1000)}
    succeeds |= {"success_target": st.floats(0, 1)}
    exports = fields | {
        "updates_max": st.just(0),
        "eval_every": st.just(0),
        "replay": st.none(),
        "foreign": st.just(()),
    }
    own_tasks = trains | {"submitted_tasks": st.just(False)}  # submitted ones have no private extras
    planned = st.tuples(st.builds(records.RunSpec, **own_tasks), variants("v")).map(
        lambda both: msgspec.structs.replace(
            both[0], variants=(msgspec.structs.replace(both[1], count=both[0].group_size),)
        )
    )
    return st.one_of(planned, *(st.builds(records.RunSpec, **each) for each in (trains, succeeds, exports)))


def replay_specs() -> st.SearchStrategy[records.ReplaySpec]:
    return st.builds(
        records.ReplaySpec,
        max_staleness=st.just(records.UNLIMITED) | st.integers(1, 100),
        share=st.floats(0.5, 1.0),
        capacity_groups=st.integers(1, 16_384),
        capacity_bytes=st.integers(1, 2**40),
        priority=st.just("return"),
        options=st.fixed_dictionaries({"temperature": st.floats(0.1, 10.0)}),
    )


@pytest.mark.parametrize("fact_type", FACTS, ids=lambda t: t.__name__)
def test_every_fact_survives_the_wire(fact_type: type) -> None:
    @settings(max_examples=40, deadline=None)
    @given(st.lists(strategy(fact_type), min_size=1, max_size=3))
    def survives(facts: list[f.Fact]) -> None:
        payload = fact_codec.encode_record("r1", 1.5, facts, "ab" * 32)
        assert fact_codec.decode_record(payload) == fact_codec.DecodedRecord("r1", 1.5, tuple(facts), "ab" * 32)

    survives()


def test_every_fact_has_its_place_in_the_oneof() -> None:
    assert set(fact_codec.FACT_TYPES) == {
        type(getattr(events_pb2.Fact(), field.name)).__name__ for field in events_pb2.Fact.DESCRIPTOR.fields
    }


@pytest.mark.parametrize("type_", HAND_WRITTEN, ids=lambda t: t.__name__)
def test_a_record_and_its_message_have_the_same_fields(type_: type) -> None:
    assert set(typing.get_type_hints(type_)) == {field.name for field in HAND_WRITTEN[type_].DESCRIPTOR.fields}


def test_bound_policy_agrees_by_name_and_number() -> None:
    ours = {f"BOUND_POLICY_{m.name}": m.value for m in records.BoundPolicy}
    assert ours == {name: number for name, number in events_pb2.BoundPolicy.items() if number}


def test_an_unset_enum_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match="must be one of 1 \\(OK\\)") as caught:
        fact_codec.decode(f.Reward, types_pb2.Reward(name="x"))
    assert caught.value.violations[0].field == "outcome"


def test_a_fact_of_a_later_version_is_refused_not_skipped() -> None:
    with pytest.raises(NewerFormat, match="does not know: a later release of rollmesh wrote it"):
        fact_codec.decode_record(events_pb2.LedgerRecord(facts=[events_pb2.Fact()]).SerializeToString())


def test_a_record_of_a_newer_format_is_refused_with_both_formats() -> None:
    record = events_pb2.LedgerRecord(record_id="d1", format=RECORD_FORMAT + 1)
    with pytest.raises(
        NewerFormat, match=r"'d1' has format 3, and this release reads formats up to 2: a later release"
    ):
        fact_codec.decode_record(record.SerializeToString())


def test_a_spec_that_cannot_work_is_a_value_error() -> None:
    message = run_pb2.CreateRunRequest(spec=events_pb2.RunSpec(run="r", beyond=events_pb2.BOUND_POLICY_DROP)).spec
    with pytest.raises(ValueError, match="`batch_groups` must be in"):
        fact_codec.decode(records.RunSpec, message)


@pytest.mark.parametrize("text", ["9" * 5000, "9" * 18, "-1", "", "Unlimited", "\u0661"])
def test_a_bound_that_is_no_number_in_range_is_an_error_of_its_field(text: str) -> None:
    log = events_pb2.ReplaySpec(max_staleness=text, share=0.5, capacity_groups=4, capacity_bytes=4, priority="fifo")
    for type_, message in (
        (records.ReplaySpec, log),
        (records.ForeignSource, events_pb2.ForeignSource(source="peer", max_age=text, share=0.5)),
    ):
        with pytest.raises(SettingError, match="whole number in .* or unlimited, got") as wrong:
            fact_codec.decode(type_, message)
        assert len(str(wrong.value)) < 300


def test_a_decoded_value_is_stored_by_a_snapshot_as_the_original() -> None:
    reward = f.Reward(name="a", value=0.5, segment=-1, scorer="s@1")
    message = fact_codec.encode(reward, types_pb2.Reward)
    assert msgspec.msgpack.encode(fact_codec.decode(f.Reward, message)) == msgspec.msgpack.encode(reward)


def test_a_ledger_from_before_summaries_is_replayed() -> None:
    run = CoreRun()
    run.begin()
    run.train(1)
    state, num_stripped = State(), 0
    for stored in run.records:
        record = events_pb2.LedgerRecord.FromString(
            fact_codec.encode_record(stored.record_id, stored.time_unix_s, stored.facts)
        )
        for fact in record.facts:
            for sample in fact.episode_scored.samples if fact.HasField("episode_scored") else ():
                assert sample.HasField("summary")
                sample.ClearField("summary")
                num_stripped += 1
        for one in fact_codec.decode_record(record.SerializeToString()).facts:
            apply(state, one)
    assert num_stripped == 4
    assert state == run.core.state
    members = [sample.meta.summary for group in state.groups.values() for sample in group.samples.values()]
    assert members == [f.SampleSummary()] * 4

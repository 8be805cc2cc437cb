"""Plans and variants of groups <-> messages."""

from __future__ import annotations

import msgspec

from rollmesh.shared.config.settings import SettingError
from rollmesh.shared.domain.extras import ExtraError, decode_extras, encode_extras
from rollmesh.shared.domain.plans import Plan, SamplingOverrides, Variant
from rollmesh.shared.errors import described_field_error
from rollmesh.v1 import data_pb2, types_pb2


def encode_plan(plan: Plan) -> data_pb2.Plan:
    return data_pb2.Plan(
        size=plan.size,
        variants=[encode_variant(one) for one in plan.variants],
        propensity=plan.propensity,
        together=plan.together,
    )


def encode_variant(variant: Variant) -> types_pb2.Variant:
    fields = msgspec.structs.asdict(variant) | {
        "sampling": types_pb2.SamplingOverrides(**variant.sampling.given()),
        "options": encode_extras(variant.options),
    }
    return types_pb2.Variant(**fields)


def decode_variant(message: types_pb2.Variant, field: str = "variant") -> Variant:
    """Raises `InvalidInput`."""
    at, given = f"{field}.sampling", {one.name: value for one, value in message.sampling.ListFields()}
    plain = {name: getattr(message, name) for name in Variant.__struct_fields__}
    try:
        plain["sampling"] = SamplingOverrides(**given)
        at = f"{field}.options"
        plain["options"] = decode_extras(message.options)
        at = field
        plain["seed"] = message.seed if message.HasField("seed") else None
        return Variant(**plain)
    except SettingError as error:
        raise described_field_error(f"{at}.{error.field}", error.what) from error
    except ExtraError as error:
        raise described_field_error(f"{at}.{error.name}", error.what) from None

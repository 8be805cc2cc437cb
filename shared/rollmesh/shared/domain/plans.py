"""Plans of groups: how many episodes a group has, and what distinguishes them.

A plan comes from the selector that drew the task, or from the settings of the run (`run.variants`). It is public: the
ledger, the leases and the agents have it. Extras that are private stay at the data service, and a variant only names
them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from rollmesh.shared.config.settings import NonNegativeInt, PositiveInt, SettingError, Settings, Share
from rollmesh.shared.domain.extras import ExtraError, encode_extras

VARIANTS_BYTES_MAX = 65_536
"""Maximum size of the variants of a group, bytes of JSON. The ledger stores them once per group."""
GROUP_SIZE_MAX = 16_384
"""Most episodes with which a group begins."""
VariantName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}\Z")]
_NameOrNone = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{0,64}\Z")]
_Text = Annotated[str, Meta(max_length=16_384)]


class SamplingOverrides(Settings):
    """Sampling of an episode where it differs from `rollout.sampling`. An absent value means the configured one."""

    temperature: Annotated[float, Meta(ge=0, le=10)] | None = None
    """Temperature. 0 is greedy."""
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Nucleus mass. 1 disables the truncation."""
    top_k: NonNegativeInt | None = None
    """Number of most probable tokens kept. 0 disables the truncation."""
    max_tokens: PositiveInt | None = None
    """Maximum number of new tokens per turn."""

    def given(self) -> dict[str, Any]:
        """Return the values that are not absent, by name."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


class Variant(Settings):
    """What distinguishes an episode within its group."""

    name: VariantName
    """Name, unique in its plan. The samples of its episodes have it."""
    count: Annotated[int, Meta(ge=1, le=GROUP_SIZE_MAX)] = 1
    """Number of episodes of the group that have it."""
    sampling: SamplingOverrides = msgspec.field(default_factory=SamplingOverrides)
    """Sampling in place of `rollout.sampling`."""
    prefix: _Text = ""
    """Text that the first answer of the model begins with. The model continues it; its tokens are not trained."""
    prefix_extra: _NameOrNone = ""
    """Private extra of the task that is used as `prefix`. `rollout.private_extras` must permit it to the agent."""
    hint: _Text = ""
    """Text that is added to the last user message of the prompt, after an empty line."""
    hint_extra: _NameOrNone = ""
    """Private extra of the task that is used as `hint`. `rollout.private_extras` must permit it to the agent."""
    role: Annotated[str, Meta(max_length=64)] = ""
    """Role of the samples to which the agent gives none."""
    agent: _NameOrNone = ""
    """Name of the agent, in `rollout.agents`. Empty: the agent of the task."""
    options: dict[str, Any] = {}
    """Options in place of those with which the agent is configured, by name."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    """Key of the random draws. Episodes of one group whose variants have the same key, and that have the same number
    within their variant, draw the same random numbers. Absent: each episode draws others."""

    def check_fields(self) -> None:
        for text in ("prefix", "hint"):
            if getattr(self, text) and getattr(self, f"{text}_extra"):
                raise SettingError(text, f"must be empty with {text}_extra = {getattr(self, f'{text}_extra')}")
        try:
            encode_extras(self.options)
        except ExtraError as error:
            raise SettingError(f"options.{error.name}", error.what) from None

    @property
    def extras(self) -> tuple[str, ...]:
        """The private extras that it names."""
        return tuple(dict.fromkeys(filter(None, (self.prefix_extra, self.hint_extra))))


class Plan(Settings):
    """The group of one draw, as a selector planned it."""

    size: Annotated[int, Meta(ge=0, le=GROUP_SIZE_MAX)] = 0
    """Number of episodes. 0: the sum of the counts of the variants, or without variants `run.group_size`."""
    variants: tuple[Variant, ...] = ()
    """Variants of the episodes, in the order of their numbers. Empty: `run.variants`, if the group has the size of
    the run; else all episodes are alike."""
    propensity: Share = 0.0
    """Probability with which the selector drew the task. 0: not stated."""
    together: _NameOrNone = ""
    """Name that groups share which belong together, such as a pair of tasks of consecutive draws. A batch takes the
    groups of a name together if it can be filled so; it never waits for one of them. Empty: none."""

    def check_fields(self) -> None:
        check_variants(self.variants, self.size)


def check_variants(variants: Sequence[Variant], size: int) -> None:
    """Raise SettingError unless the variants have different names, fit into the ledger, and fill a group of `size`
    episodes (0: of any size up to the maximum)."""
    names = [variant.name for variant in variants]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise SettingError(f"variants[{index}].name", f"must be different in each variant, got {name!r} twice")
    total = sum(variant.count for variant in variants)
    if variants and size and total != size:
        raise SettingError("variants", f"must have counts that sum to the size of the group, {size}, got {total}")
    if total > GROUP_SIZE_MAX:
        raise SettingError("variants", f"must have counts that sum to at most {GROUP_SIZE_MAX}, got {total}")
    if (num_bytes := variants_bytes(variants)) > VARIANTS_BYTES_MAX:
        raise SettingError("variants", f"must have at most {VARIANTS_BYTES_MAX} bytes of JSON, got {num_bytes}")


def variants_bytes(variants: Sequence[Variant]) -> int:
    """Return the size of variants as JSON, bytes. Their messages have at most as many."""
    return len(json.dumps([msgspec.to_builtins(variant) for variant in variants])) if variants else 0


def variant_of(variants: Sequence[Variant], index: int) -> tuple[Variant, int] | None:
    """Return the variant of episode `index` of a group, and the number of the episode within the variant, both from 0.
    Episodes beyond the counts begin again with the first variant. None without variants."""
    if not variants:
        return None
    lap, place = divmod(index, sum(variant.count for variant in variants))
    for variant in variants:
        if place < variant.count:
            return variant, lap * variant.count + place
        place -= variant.count
    raise AssertionError("the counts cover every place")

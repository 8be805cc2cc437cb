"""The table of endpoints in the configuration of a mesh, and the checks of one that need no network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rollmesh.shared.config.extras import libraries_needed
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.config.settings import (
    LIVE,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Settings,
)
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.net.http_link import read_key
from rollmesh.shared.weights.model_folder import find_model

EndpointKind = Literal["openai", "frozen", "policy_step"]
EndpointName = Annotated[str, Meta(pattern="^[A-Za-z0-9_]{1,64}$")]
_KEYS_OF_KIND = {
    "openai": ("base_url", "key_file", "key_env", "request"),
    "frozen": ("nodes", "engine"),
    "policy_step": ("step", "incarnation"),
}


class EndpointConfig(Settings):
    """One model without a learner, with the limits of its client. Limits of requests hold for each process that
    asks."""

    kind: EndpointKind
    """`openai`: a server of the OpenAI chat protocol. `frozen`: weights that do not change, on inference nodes of the
    endpoint. `policy_step`: a past step of the policy, on the inference nodes of the run."""
    base_url: Annotated[str, LIVE] = ""
    """`openai`: URL before `/chat/completions`, such as `https://HOST/v1`."""
    model: str = ""
    """`openai`: name of the model in the requests. `frozen`: folder of the weights in transformers format, with
    tokenizer, relative to the configuration file."""
    key_file: Annotated[str, LIVE] = ""
    """`openai`: file with the key of the server, relative to the configuration file."""
    key_env: Annotated[str, LIVE] = ""
    """`openai`: environment variable with the key, in the processes that ask. Empty, without `key_file`: no key."""
    request: dict[str, Any] = {}
    """`openai`: further fields of each request. A field of the same name is replaced; null removes it, such as
    `max_tokens: null`."""
    step: NonNegativeInt = 0
    """`policy_step`: the step. Nodes keep it beside the newest step if their engine has `versions_max` >= 2."""
    incarnation: NonNegativeInt = 0
    """`policy_step`: the incarnation of the step."""
    nodes: Annotated[NonNegativeInt, LIVE] = 1
    """`frozen`: number of nodes that this host starts. With 0 they join from elsewhere: `rollmesh serve
    endpoint-NAME`."""
    engine: Extension | None = None
    """`frozen`: the engine of these nodes. Unset: as in `inference.engine`."""
    temperature: Annotated[float, Meta(ge=0, le=10)] = 0.0
    """Temperature of a request that names none. 0 is greedy."""
    max_tokens: PositiveInt = 512
    """Maximum number of new tokens of a request that names none."""
    price_prompt: Annotated[NonNegativeFloat, LIVE] = 0.0
    """Price of a million prompt tokens, in any currency."""
    price_completion: Annotated[NonNegativeFloat, LIVE] = 0.0
    """Price of a million new tokens, in the same currency."""
    price_max: Annotated[NonNegativeFloat, LIVE] = 0.0
    """Limit of the price of a run. Each request is checked before it is sent, so the requests that run then may exceed
    it. Nodes on another host have a separate limit. 0: no limit."""
    timeout_s: Annotated[PositiveFloat, LIVE] = 60.0
    """Timeout of one attempt, in seconds."""
    retry_s: Annotated[NonNegativeFloat, LIVE] = 60.0
    """Time after which a failed request is not repeated any more, in seconds. Only requests that an unreachable, slow
    or overloaded server failed are repeated."""
    backoff_s: Annotated[PositiveFloat, LIVE] = 0.5
    """First pause between attempts, in seconds; doubles up to `backoff_s_max`."""
    backoff_s_max: Annotated[PositiveFloat, LIVE] = 10.0
    """Longest pause between attempts, in seconds."""
    concurrency: Annotated[PositiveInt, LIVE] = 16
    """Most requests of one process that run at once; further ones wait."""
    requests_per_s: Annotated[NonNegativeFloat, LIVE] = 0.0
    """Most requests that one process sends per second; further ones wait. 0: no limit."""
    record: Annotated[str, LIVE] = ""
    """Folder to which answers are recorded, relative to the configuration file. Empty: none are."""
    replay: str = ""
    """Folder of recorded answers, relative to the configuration file. A request without a recorded answer fails, or is
    sent if `record` is set too. Empty: every request is sent."""

    def check_fields(self) -> None:
        for kind, names in _KEYS_OF_KIND.items():
            for name in names:
                if kind != self.kind and getattr(self, name) != _DEFAULTS[name]:
                    raise ValueError(f"`{name}` is a key of the kind {kind}, got kind {self.kind!r}; remove it")
        if self.kind == "policy_step" and self.model:
            raise ValueError(f"`model` must be empty for the kind policy_step, got {self.model!r}")
        if self.kind != "policy_step" and not self.model:
            raise ValueError(f"`model` must not be empty for the kind {self.kind}")
        if self.kind == "openai" and not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"`base_url` must be http://... or https://..., got {self.base_url!r}")
        if self.key_file and self.key_env:
            raise ValueError("`key_env` must be empty with `key_file`; remove one of them")
        if self.backoff_s_max < self.backoff_s:
            raise ValueError(f"`backoff_s_max` must be >= backoff_s = {self.backoff_s}, got {self.backoff_s_max}")

    @property
    def has_price(self) -> bool:
        return bool(self.price_prompt or self.price_completion)

    def price(self, prompt_tokens: int, completion_tokens: int) -> float:
        """Return the price of a request."""
        return (prompt_tokens * self.price_prompt + completion_tokens * self.price_completion) / 1e6

    def key(self, base_dir: Path) -> str:
        """Return the key of the server; empty if it needs none. Raises ConfigError, which does not contain the key."""
        if self.key_env:
            key = os.environ.get(self.key_env, "").strip()
            if not key or not key.isascii() or not key.isprintable():
                raise ConfigError(
                    f"`key_env`: the environment variable {self.key_env} must contain one printable ASCII key",
                    key="key_env",
                )
            return key
        if not self.key_file:
            return ""
        try:
            return read_key(str(base_dir / Path(self.key_file).expanduser()))
        except ConfigError as err:
            raise ConfigError(err.message.replace("`api_key_file`", "`key_file`"), key="key_file") from err


EndpointTable = dict[EndpointName, EndpointConfig]
_DEFAULTS = {
    field.name: field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    for field in msgspec.structs.fields(EndpointConfig)
}


def check_endpoint(config: EndpointConfig, base_dir: Path) -> None:
    """Check what a request would need from this host: library, key, weights, recorded answers. Raises ConfigError."""
    if config.kind == "openai":
        with libraries_needed("an endpoint of kind openai"):
            import aiohttp  # noqa: F401
    config.key(base_dir)
    if config.kind == "frozen":
        find_model(config.model, base_dir)
    if config.replay and not config.record and not (base_dir / config.replay).is_dir():
        raise ConfigError(
            f"`replay`: there is no folder {base_dir / config.replay}; record answers first, with `record`",
            key="replay",
        )

"""What an episode has asked of endpoints: numbers of calls, tokens, price and latency by endpoint and caller.

Agents pass the meter of their episode. Scorers and other code below `metered` need not, because a context variable
holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from msgspec.structs import replace

from rollmesh.shared.domain.trajectory import EndpointUse
from rollmesh.shared.endpoints.answer import EndpointAnswer

MODEL_CHARS_MAX = 128
"""Maximum length of `EndpointUse.model`."""


class EndpointMeter:
    """The use of endpoints by one caller in one episode."""

    def __init__(self, scope: str = "", *, caller: str = "") -> None:
        """`scope` is the id of the episode or of the sample. It is the same in every attempt. `caller` is "agent" or
        the scorer."""
        self.scope = scope
        self.cut = ""
        """The endpoint whose answer was awaited when the caller was cancelled, such as by its time limit."""
        self.cut_s = 0.0
        """When that was, by the clock of the event loop."""
        self._caller = caller
        self._uses: dict[str, EndpointUse] = {}
        self._asked: dict[str, set[int]] = {}

    @property
    def uses(self) -> tuple[EndpointUse, ...]:
        """The use by endpoint, in the order of the first responses."""
        return tuple(self._uses.values())

    def number(self, digest: str) -> int:
        """Return the lowest number that no equal request has. One that fails or is cancelled releases its number, as in
        a replay."""
        taken = self._asked.setdefault(digest, set())
        number = next(number for number in range(len(taken) + 1) if number not in taken)
        taken.add(number)
        return number

    def release(self, digest: str, number: int) -> None:
        """Release the number of a request that got no answer."""
        self._asked[digest].discard(number)

    def add(self, endpoint: str, answer: EndpointAnswer) -> None:
        """Count an answer without its price, which `add_price` has counted."""
        use = self._use(endpoint)
        self._uses[endpoint] = replace(
            use,
            calls=use.calls + 1,
            replayed=use.replayed + answer.replayed,
            prompt_tokens=use.prompt_tokens + answer.prompt_tokens,
            completion_tokens=use.completion_tokens + answer.completion_tokens,
            latency_s=use.latency_s + answer.latency_s,
            model=answer.model[:MODEL_CHARS_MAX] or use.model,
        )

    def add_price(self, endpoint: str, price: float) -> None:
        """Count the price of a response, also of one that fails the request."""
        use = self._use(endpoint)
        self._uses[endpoint] = replace(use, price=use.price + price)

    def _use(self, endpoint: str) -> EndpointUse:
        return self._uses.get(endpoint) or EndpointUse(endpoint=endpoint, caller=self._caller)


_METER: ContextVar[EndpointMeter | None] = ContextVar("endpoint meter", default=None)


@contextmanager
def metered(meter: EndpointMeter) -> Iterator[EndpointMeter]:
    """Count the requests that the body makes, also in tasks that it starts."""
    token = _METER.set(meter)
    try:
        yield meter
    finally:
        _METER.reset(token)


def current_meter() -> EndpointMeter:
    """Return the meter of the context; a new one outside of an episode."""
    return _METER.get() or EndpointMeter()


def summed(uses: Iterable[EndpointUse]) -> tuple[EndpointUse, ...]:
    """Join the uses of each pair of endpoint and caller."""
    found: dict[tuple[str, str], EndpointUse] = {}
    for use in uses:
        key = (use.endpoint, use.caller)
        before = found.get(key)
        found[key] = use if before is None else before.plus(use)
    return tuple(found.values())

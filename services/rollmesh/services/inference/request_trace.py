"""Trace one request at this node: a span `engine` with the children `queue`, `prefill` and `decode`.

Only requests with a sampled trace context are traced. `prefill` ends at the first delta, because it also draws the
first token.
"""

from __future__ import annotations

from rollmesh.services.inference.engine import GenerateDelta
from rollmesh.shared.telemetry import tracing

SERVICE = "inference"


class RequestTrace:
    """The trace of one request, from its submission to its last delta."""

    def __init__(self, parent: str, node_id: str) -> None:
        self._parent = parent
        self._node_id = node_id
        self._start_ns = tracing.now_ns()
        self._first_ns = 0
        self._queued_ns = 0
        self._attributes: dict[str, str | int | float | bool] = {"rollmesh.node": node_id}
        self._num_tokens = 0

    def add(self, delta: GenerateDelta) -> None:
        """Record a delta. The last one ends the trace."""
        self._num_tokens += int(delta.token_ids.size)
        if not self._first_ns and delta.token_ids.size:
            self._first_ns = tracing.now_ns()
            self._queued_ns = int(delta.queued_s * 1e9)
            self._attributes |= {"cached_tokens": delta.num_prompt_cached, "prefill_tokens": delta.num_prompt_prefilled}
        if delta.finish is not None:
            self.end(delta.finish.name)

    def end(self, how: str) -> None:
        """Write the spans."""
        end_ns = tracing.now_ns()
        attributes = {**self._attributes, "tokens": self._num_tokens, "finish": how}
        parent = tracing.parent_of(self._parent)
        if parent is None:
            return
        with tracing.span_at(parent, "engine", SERVICE, self._start_ns, end_ns, attributes):
            admitted_ns = min(self._start_ns + self._queued_ns, self._first_ns or end_ns)
            parts = [("queue", self._start_ns, admitted_ns if self._first_ns else end_ns)]
            if self._first_ns:
                parts += [("prefill", admitted_ns, self._first_ns), ("decode", self._first_ns, end_ns)]
            for name, start_ns, stop_ns in parts:
                tracing.record(None, name, SERVICE, start_ns, stop_ns)

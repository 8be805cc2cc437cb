"""The users of a mesh at NATS: one for each kind of service, and the subjects that it may use.

| user | service | may |
| --- | --- | --- |
| coordinator | the coordinator | create, read, purge and delete streams; write ledgers and dead letters |
| rollout | rollout workers | write samples |
| data | the data service | read |
| gateway | gateways | read; write dead letters |
| operator | commands on a run, and processes that host several of the services above | everything in the account of the mesh |

The other kinds of services do not use NATS. A stream has the subject `RM.RUN.KIND`, so that a permission can name all
streams of a kind. The subjects of the JetStream API end in the name of a stream, which NATS can permit for one stream
or for all streams of the account. So a user that may read can read every stream of its mesh.

NATS checks the subject of a message, not the subject that it names for the answer, to which the server publishes. A
user in the account of the streams could thus name the subject of a ledger and have an answer stored there. So rollout
workers, which run the code of agents, are in a separate account (`OUTSIDE`) without streams, in which answers stay. The
data service and gateways need consumers, which can publish to any subject of the account, and are trusted with that.
"""  # noqa: E501, W505

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

COORDINATOR, ROLLOUT, DATA, GATEWAY, OPERATOR = "coordinator", "rollout", "data", "gateway", "operator"

_API = "$JS.API"
_OPEN = (f"{_API}.INFO", f"{_API}.STREAM.INFO.*")
_READ = (
    *_OPEN,
    f"{_API}.STREAM.MSG.GET.*",
    f"{_API}.CONSUMER.CREATE.*",
    f"{_API}.CONSUMER.MSG.NEXT.*.*",
    f"{_API}.CONSUMER.DELETE.*.*",
)
_MANAGE = tuple(f"{_API}.STREAM.{verb}.*" for verb in ("CREATE", "UPDATE", "DELETE", "PURGE"))

PUBLISH: Mapping[str, tuple[str, ...]] = MappingProxyType({
    COORDINATOR: (*_READ, *_MANAGE, f"{_API}.DIRECT.GET.*", f"{_API}.STREAM.LIST", "RM.*.LEDGER", "RM.*.DEAD"),
    ROLLOUT: (*_OPEN, "RM.*.SAMPLES"),
    DATA: _READ,
    GATEWAY: (*_READ, f"{_API}.DIRECT.GET.*", "RM.*.DEAD"),
    OPERATOR: (f"{_API}.>", "RM.>"),
})  # fmt: skip
"""Subjects to which each user may publish. Every user may subscribe only to its own inbox, so that no user reads the
answers to another."""

OUTSIDE = (ROLLOUT,)
"""Users with a separate account, which imports what they may publish to from that of the mesh."""


def inbox_of(user: str) -> str:
    """Return the prefix of the subjects on which `user` gets answers."""
    return f"_INBOX.{re.sub(r'[^A-Za-z0-9_-]', '_', user)}"


def role_of(services: Iterable[str]) -> str:
    """Return the user of a process with these services, such as `rollout-0`; empty if none of them uses NATS."""
    found = {service.partition("-")[0] for service in services} & PUBLISH.keys()
    return found.pop() if len(found) == 1 else (OPERATOR if found else "")

"""The loop of a worker process of `worker_pool`. It reads one JSON object per line and writes one per line, until its
input ends.

A request is the key, `{..., "text": "...", "cpu_s": 2.0}`. The first reply is `{"key": true}` once the key has been
read, the second one that of the comparer, or `{"error": "..."}` for a key with which nothing can be compared. The
kernel ends this process by SIGPROF when the key, or then the text, has taken `cpu_s` of CPU, also in C code; time in
which other processes run does not count.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol


class ReadKey(Protocol):
    """A key that has been read."""

    @property
    def cpu_s(self) -> float:
        """CPU time that a comparison repeats for the key, in seconds. The text gets it in addition."""


class KeyedComparer(Protocol):
    """Compares texts with keys."""

    def read(self, request: Mapping[str, Any]) -> Any:
        """Return the key of a request, a ReadKey. It does not raise: an error of the key is part of the key."""

    def reply(self, key: Any, text: str) -> dict[str, Any]:
        """Compare a text with a key. An error of the key is `{"error": ...}`; any other failure is a wrong answer."""


def serve(make: Callable[[], KeyedComparer]) -> None:
    """Answer requests. The first argument of the program is its address space, in bytes."""
    memory_bytes_max = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes_max, memory_bytes_max))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    comparer = make()  # after the limit, so that the limit applies to it
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
        key: ReadKey = comparer.read(request)
        signal.setitimer(signal.ITIMER_PROF, request["cpu_s"] + key.cpu_s)
        print(json.dumps({"key": True}), flush=True)
        reply = comparer.reply(key, request["text"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reply), flush=True)

"""Stateless functions for attacks on shared sessions: honest ones, and ones that break their contract."""

from __future__ import annotations

import asyncio

from rollmesh.services.sandbox.config import ProfileConfig, SandboxConfig
from rollmesh.services.sandbox.engine import RunResult
from rollmesh.services.sandbox.engines.jail_engine import JailEngine
from rollmesh.services.sandbox.sessions import Sessions
from rollmesh.services.sandbox.stateless_calls import StatelessCalls
from rollmesh.shared.clock import SystemClock
from rollmesh.shared.domain.ids import IdSource
from rollmesh.shared.errors import MeshError

PROFILE = "shared"
_PRELUDE = """
import builtins, json, os, sys

KEPT = []
class Hidden: pass

def look(_):
    names = sorted(set(globals()) & {"left", "secret"})
    return json.dumps([names, KEPT, os.listdir("."), os.getcwd(), os.environ.get("LEFT", ""), list(by_default.__defaults__[0]), abs(-1), add("1+2")])
def add(text): a, b = text.split("+"); return int(a) + int(b)
def echo(text): return text
def by_global(text): globals()["left"] = text
def by_list(text): KEPT.append(text)
def by_default(text, seen=[]): seen.append(text)
def by_file(text): open("left", "w").write(text)
def by_directory(text): os.mkdir("left"); os.chdir("left")
def by_environment(text): os.environ["LEFT"] = text
def by_builtin(text): builtins.abs = lambda number: text
def by_function(text): globals()["add"] = lambda other: text
def by_child(text):
    if not os.fork():
        while True: open("left", "w").write(text)
def hide(text): Hidden.left = text
def find(_): return getattr(Hidden, "left", "nothing")
def spin(_):
    while True: pass
def eat(_): return len(bytearray(1 << 30))
def flood(_):
    while True: print("x" * 1000)
def fork(_):
    while True: os.fork() or os.pause()
def leave(_): os._exit(3)
def recurse(text): return recurse(text + "x")
def evaluate(text): return repr(eval(text))
"""
FUNCTIONS = tuple(line.split("(")[0][4:] for line in _PRELUDE.splitlines() if line.startswith("def "))
WALL_S = 2.0


def profile(limits: dict[str, int | float]) -> ProfileConfig:
    return ProfileConfig(prelude=_PRELUDE, stateless=FUNCTIONS, limits=limits)


class SharedCalls:
    """The stateless calls of one attack. `end` ends their sessions."""

    def __init__(self, engine: JailEngine, config: SandboxConfig, ids: IdSource) -> None:
        clock = SystemClock()
        self.sessions = Sessions(engine, config, clock)
        self._calls = StatelessCalls(self.sessions, config, clock=clock, ids=ids)

    async def call(self, function: str, text: str, tenant: str) -> RunResult:
        """Call a function. Raises MeshError for a rejection."""
        done: asyncio.Future[RunResult | MeshError] = asyncio.get_running_loop().create_future()
        self._calls.submit(PROFILE, tenant, function, [text], WALL_S, done.set_result)
        result = await done
        if isinstance(result, MeshError):
            raise result
        return result

    async def end(self) -> None:
        await self._calls.drain()

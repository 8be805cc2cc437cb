"""Run attacks: one engine, a neighbor that works continuously, and a fresh session for each attack.

    observe host and neighbor -> open -> attack (the neighbor's calls are timed meanwhile) -> end -> observe again

An attack is contained if its reply is the expected one *and* nothing that it could have reached has changed: the bait
on the host, the neighbor's files, processes and signals, this process, the zygote. No process of the session may be
left after its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import textwrap
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollmesh.sandbox_runtime.program import Program
from rollmesh.services.sandbox.config import PoolsConfig, ProfileConfig, SandboxConfig
from rollmesh.services.sandbox.egress.config import EgressConfig
from rollmesh.services.sandbox.engine import RunResult
from rollmesh.services.sandbox.engines.jail_engine import JailEngine
from rollmesh.services.sandbox.sessions import Sessions
from rollmesh.shared.domain.ids import SeededIds
from rollmesh.shared.errors import InvalidInput, MeshError, SandboxFailed, UnknownSession

from . import online, sharing
from .attack import Attack, Verdict, mismatch
from .internet import Internet, internet
from .judging import Bench, bench
from .neighbor import Neighbor
from .processes import descendants
from .world import World

LIMITS: dict[str, int | float] = {
    "call_s": 20.0,
    "cpu_s": 20.0,
    "memory_bytes": 96 << 20,
    "processes_max": 12,
    "disk_bytes": 4 << 20,
    "inodes_max": 64,
    "file_bytes": 2 << 20,
    "output_bytes": 4000,
    "flood_bytes": 100_000,
    "cpu_total_s": 60,
}
GRACE_S = 3.0
_REPLY_BYTES_MAX = 6 * 4 * int(LIMITS["output_bytes"])
INSIDE = Path(__file__).with_name("inside.py").read_text()


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Result of one attack."""

    name: str
    verdict: str
    """Observed verdict, in words of `Verdict`; the attack's verdict if it was contained."""
    faults: Sequence[str] = ()
    """Reasons why it was not contained; empty if it was."""

    @property
    def contained(self) -> bool:
        return not self.faults


class Scene:
    """One attacker's session, for attacks that use other commands besides `run`."""

    def __init__(
        self,
        engine: JailEngine,
        facts: Mapping[str, object],
        attack: Attack,
        judging: Bench | None,
        calls: sharing.SharedCalls,
    ) -> None:
        self._engine = engine
        self._calls = calls
        self._facts = facts
        self._attack = attack
        self._bench = judging
        self.result: RunResult | None = None
        self.lines: list[str] = []
        self.received: list[str] = []
        """All output of the jail, which must not contain a secret."""

    def say(self, line: str) -> None:
        """Add a line that `held` checks."""
        self.lines.append(line)

    async def run(self, source: str, wall_s: float | None = None) -> RunResult:
        """Run source in the attacker's session. `result` is the last result."""
        code = with_facts(source, self._facts)
        self.result = await self._engine.run("attacker", Program(code=code), wall_s or self._attack.wall_s)
        self.received.append(str(self.result))
        return self.result

    async def call(self, function: str, *arguments: str) -> RunResult:
        self.result = await self._engine.call("attacker", function, arguments, self._attack.wall_s)
        self.received.append(str(self.result))
        return self.result

    async def elsewhere(self, source: str, profile: str = "python", wall_s: float = 2.0) -> str:
        """Run source in a new session of another tenant."""
        await self._engine.open("later", profile, self._engine.limits(profile), tenant="another")
        code = with_facts(source, self._facts)
        try:
            return (await self._engine.run("later", Program(code=code), wall_s)).result
        finally:
            await self._engine.end("later")

    async def shared(self, function: str, text: str, tenant: str = "run") -> RunResult:
        """Call a function in a session that the calls of `tenant` share."""
        self.result = await self._calls.call(function, text, tenant)
        self.received.append(str(self.result))
        return self.result

    @property
    def leases(self) -> Sessions:
        """The leases of the shared sessions."""
        return self._calls.sessions

    @property
    def shared_ids(self) -> list[str]:
        return list(self.leases.owners())

    @property
    def num_shared(self) -> int:
        """Number of shared sessions so far."""
        return self.leases.counts().created

    async def judged(self, kind: str, source: str) -> str:
        """Judge a candidate by hidden tests, in separate sessions."""
        assert self._bench is not None, "an arena without judge"
        return await self._bench.verdict(kind, source)

    def named(self, path: str) -> str:
        """Fill facts of the world, named in braces, into a path."""
        for name, value in self._facts.items():
            path = path.replace("{" + name + "}", str(value))
        return path

    async def put(self, path: str, content: bytes = b"put") -> str:
        """Write a file by the file API. Return "put" or the rejection."""
        try:
            await self._engine.put_files("attacker", {path: content})
        except InvalidInput as error:
            return f"refused: {error}"
        except UnknownSession as error:
            return f"ended: {error}"
        return "put"

    async def get(self, path: str, bytes_max: int = 1 << 20) -> str:
        """Read a file by the file API."""
        try:
            files = await self._engine.get_files("attacker", [path], bytes_max)
        except InvalidInput as error:
            return f"refused: {error}"
        except UnknownSession as error:
            return f"ended: {error}"
        content = files.get(path)
        if content is None:
            return f"got other files: {list(files)}"
        self.received.append(content.decode(errors="replace"))
        return f"got {content[:60]!r}" if len(content) <= bytes_max else f"got {len(content)} bytes"


class Arena:
    """The arena of the attacks. Create it with `arena()`."""

    def __init__(
        self, engine: JailEngine, config: SandboxConfig, world: World, layout: Internet | None, judging: Bench | None
    ) -> None:
        self.engine = engine
        self._config = config
        self._ids = SeededIds(1)
        self._bench = judging
        self.world = world
        self._place = layout
        self._facts = {**world.facts(), **(layout.facts() if layout is not None else {})}
        self.neighbor = Neighbor(engine)
        self._crashes: list[str] = []
        """Errors of the service's event loop since the last attack."""
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self._crashes.append(_reported(context)))

    async def play(self, attack: Attack) -> Score:
        """Run one attack."""
        await self.engine.open("attacker", attack.profile, self.engine.limits(attack.profile), tenant=attack.name)
        before = await self._look()
        calls = sharing.SharedCalls(self.engine, self._config, self._ids)
        scene = Scene(self.engine, self._facts, attack, self._bench, calls)
        lost: list[str] = []
        try:
            async with self.neighbor.timed(attack.name), asyncio.timeout(60):
                await self._attack(scene, attack)
            alive = await self._alive()
        except SandboxFailed as error:
            alive, lost = False, [f"the jail was lost: {error}"]
        except Exception as error:  # noqa: BLE001 - whatever the service raised to its user is the finding
            alive, lost = False, [f"the service raised {error!r}"]
        finally:
            await calls.end()
            await self.engine.end("attacker")
        faults = [*lost, *_faults(attack, scene, alive=alive), *self._leaks(scene), *await self._harm(before)]
        return Score(name=attack.name, verdict=_verdict(attack, scene), faults=faults)

    async def _attack(self, scene: Scene, attack: Attack) -> None:
        if attack.drive is not None:
            await attack.drive(scene)
        else:
            result = await scene.run(attack.source)
            scene.lines += result.stdout.splitlines()

    async def _alive(self) -> bool:
        """Return whether the attacker's session still replies."""
        with contextlib.suppress(Exception):  # any error means that it does not reply
            return (await self.engine.run("attacker", Program(code="6*7"), 10.0)).result == "42"
        return False

    async def _look(self) -> Mapping[str, object]:
        return {
            "host": await asyncio.to_thread(self.world.look),
            "processes": await asyncio.to_thread(descendants, os.getpid()),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "limits": [resource.getrlimit(kind) for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)],
            "priority": os.getpriority(os.PRIO_PROCESS, 0),
            "neighbor": await self.neighbor.state(),
            "outside": (await asyncio.to_thread(self._place.look))[1] if self._place is not None else [],
        }

    async def _harm(self, before: Mapping[str, object]) -> list[str]:
        """Return what the attack changed outside its session, which started after the first observation and has ended
        before the second."""
        try:
            after = await self._look()
        except MeshError as error:
            await self.neighbor.replace()
            return [f"the neighbor was lost: {error}"]
        faults = before["host"].changes(after["host"])  # type: ignore[attr-defined]
        left = after["processes"] - before["processes"]  # type: ignore[operator]
        if left:
            faults.append(f"{len(left)} processes were left")
        for name in ("limits", "priority", "neighbor", "outside"):
            if before[name] != after[name]:
                faults.append(f"{name}: {before[name]} became {after[name]}")
        faults += self._crashes
        self._crashes.clear()
        if after["descriptors"] > before["descriptors"]:  # type: ignore[operator]
            faults.append("descriptors were left open in the service")
        return faults  # type: ignore[no-any-return]

    def _leaks(self, scene: Scene) -> list[str]:
        everything = "".join(scene.received)
        secrets = {"host": self.world.secret, "neighbor": self.neighbor.secret}
        if self._place is not None:
            secrets["other policy"] = self._place.secret
        return [f"the {name}'s secret came out" for name, secret in secrets.items() if secret in everything]


def _reported(context: Mapping[str, object]) -> str:
    return f"in the service: {context['message']}: {context.get('exception')!r}"


def with_facts(source: str, facts: Mapping[str, object]) -> str:
    """Return the complete source that an attacker runs."""
    return f"{INSIDE}\nglobals().update({dict(facts)!r})\n{textwrap.dedent(source)}"


def _verdict(attack: Attack, scene: Scene) -> str:
    if scene.result is None or scene.result.outcome in attack.outcomes:
        return attack.verdict.value
    return scene.result.outcome.value


def _faults(attack: Attack, scene: Scene, *, alive: bool) -> list[str]:
    faults = []
    result = scene.result
    if result is not None:
        if result.outcome not in attack.outcomes:
            observed = result.error_type, result.error_message
            faults.append(f"outcome {result.outcome.value}, not {attack.verdict.value}: {observed}")
        if (size := sum(len(text) for text in scene.received)) > _REPLY_BYTES_MAX * max(1, len(scene.received)):
            faults.append(f"a reply of {size} characters")
    if attack.held and (why := mismatch("\n".join(scene.lines), attack.held)):
        faults.append(why)
    wanted = {Verdict.ENDED: False, Verdict.REFUSED: True}.get(attack.verdict, attack.alive)
    if wanted is not None and alive is not wanted:
        faults.append(f"the session was {'alive' if alive else 'dead'} afterwards")
    return faults


@contextlib.asynccontextmanager
async def arena(
    state_dir: Path, world: World, *, judging: bool = False, egress: bool = False, leaky: bool = False
) -> AsyncIterator[Arena]:
    """Yield an engine with its neighbor, and optionally a judge and a web server. `leaky`: see `online.policies`."""
    async with contextlib.AsyncExitStack() as stack:
        layout = stack.enter_context(internet()) if egress else None
        config = _config(layout, state_dir, leaky=leaky)
        engine = JailEngine(config, state_dir=state_dir / "engine", ids=SeededIds(os.getpid()))
        stack.push_async_callback(engine.close)
        await engine.start()
        judge = await stack.enter_async_context(bench(state_dir / "judge")) if judging else None
        if layout is not None:  # its zygote would be mistaken for a process that an attack left
            await engine.open("first", online.INNER, engine.limits(online.INNER))
            await engine.end("first")
        await engine.open("second", sharing.PROFILE, engine.limits(sharing.PROFILE))  # for the same reason
        await engine.end("second")
        made = Arena(engine, config, world, layout, judge)
        await made.neighbor.open()
        yield made


def _config(layout: Internet | None, folder: Path, *, leaky: bool) -> SandboxConfig:
    """The configuration without ready sessions, because processes and descriptors that did not exist before count as
    left by an attack."""
    profiles = {"python": ProfileConfig(limits=LIMITS), sharing.PROFILE: sharing.profile(LIMITS)}
    egress: Mapping[str, EgressConfig] = {}
    if layout is not None:
        profiles |= online.profiles(LIMITS)
        egress = online.policies(layout, folder / "records", leaky=leaky)
    pools = PoolsConfig(ready_max=0)
    return SandboxConfig(profiles=profiles, egress=dict(egress), grace_s=GRACE_S, sessions_max=8, pools=pools)

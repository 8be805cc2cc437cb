"""Run the tools that the task of an episode names, in sandbox sessions that last as long as the episode.

Each profile has one session. It opens in INIT, and again after a call that ended it (a limit inside the jail is a model
failure). A fork has separate sessions, in the current state of the originals, so that branches of a tree cannot change
each other's files and variables. A stateless tool needs no session of the episode. The session of a profile that has
one opens with the first call of another tool. Collaborators: the sandbox port; `environment` (calls), `episode` (opens
and closes).
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from rollmesh.services.rollout.agent_types import ToolResult
from rollmesh.services.rollout.chat_format import ToolSchema
from rollmesh.services.rollout.config import ToolConfig
from rollmesh.services.rollout.ports import SandboxPort, SandboxSession
from rollmesh.shared.clients.sandbox import ExecOutcome, ExecResult
from rollmesh.shared.domain.trajectory import EpisodeKey
from rollmesh.shared.errors import NotFound, SandboxFailed, SessionNotSaved


class ToolBox:
    """Call tools by the names that the task uses."""

    def __init__(
        self, sandbox: SandboxPort, tools: Mapping[str, ToolConfig], names: Sequence[str], key: EpisodeKey, ttl_s: float
    ) -> None:
        """Raise `NotFound` for a tool of the task that is not configured."""
        missing = [name for name in names if name not in tools]
        if missing:
            known = ", ".join(tools) or "none"
            raise NotFound(
                f"tool `{missing[0]}` of the task is not configured; known: {known}; add it to rollout.tools"
            )
        self._sandbox = sandbox
        self._tools = {name: tools[name] for name in names}
        self._key = key
        self._ttl_s = ttl_s
        self._stack = AsyncExitStack()
        self._sessions: dict[str, SandboxSession] = {}
        self._numbers = itertools.count(1)
        self.calls: Counter[bool] = Counter()
        """Number of calls, of forks too, by whether the tool succeeded."""
        self.lost: tuple[str, ...] = ()
        """Values that the fork could not save, as `profile: name`."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tools)

    @property
    def schemas(self) -> tuple[ToolSchema, ...]:
        """The tools as described in the prompt."""
        return tuple(tool_schema(name, tool) for name, tool in self._tools.items())

    async def open(self) -> None:
        """Open the sessions that the tools are expected to need."""
        shared = {tool.profile for tool in self._tools.values() if tool.stateless}
        for profile in dict.fromkeys(tool.profile for tool in self._tools.values()):
            if profile not in shared:
                await self._session(profile)

    async def call(self, name: str, text: str) -> ToolResult:
        """Return the tool's result for `text`. Raise `NotFound` for a tool that the task does not list, which is a
        mistake of the agent, and `SandboxFailed` and other `MeshError`s for infra failures."""
        result = await self._call(name, text)
        self.calls[result.ok] += 1
        return result

    async def _call(self, name: str, text: str) -> ToolResult:
        tool = self._tools.get(name)
        if tool is None:
            raise NotFound(
                f"`env.tool({name!r})`: the task does not list this tool; tools of the task: "
                f"{', '.join(self.names) or 'none'}; add it to `tools` of the task (data.source.options.tools). An "
                "agent whose model writes the name compares it with task.tools first"
            )
        if tool.stateless:
            result = await self._sandbox.call_stateless(
                tool.profile, tool.function, text, tenant=self._key.run, call_key=self._new_id()
            )
        else:
            result = await self._call_in_session(tool, text)
        if result.outcome is ExecOutcome.INFRA_FAILURE:
            raise SandboxFailed(
                f"{tool.profile}: {result.error or 'the jail was lost'}; another worker retries the episode"
            )
        ok = result.outcome is ExecOutcome.OK
        return ToolResult(text=result_text(result), ok=ok, name=name, error="" if ok else result.outcome.name)

    async def _call_in_session(self, tool: ToolConfig, text: str) -> ExecResult:
        session = await self._session(tool.profile)
        if tool.function:
            result = await session.call(tool.function, text)
        else:
            result = await session.run(text, language=tool.language, arguments=tool.arguments)
        if not result.session_alive:
            self._sessions.pop(tool.profile, None)
        return result

    async def fork(self) -> ToolBox:
        """Return the same tools on forked sessions, which end with the originals. Raise `MeshError` for infra failures.

        A session whose program prevents its snapshot is missing in the fork, which opens a fresh one when it needs it.
        Its `lost` names it.
        """
        twin = copy.copy(self)
        twin._sessions = {}
        for profile, session in list(self._sessions.items()):
            try:
                forked, lost = await self._fork_session(session)
            except SessionNotSaved as error:  # the model's code caused it, so it is not an infra failure
                twin.lost += (f"{profile}: the session ({error})",)
                if "ended" in error.metadata:
                    del self._sessions[profile]
                continue
            twin._sessions[profile] = forked
            twin.lost += tuple(f"{profile}: {name}" for name in lost)
        return twin

    async def _fork_session(self, session: SandboxSession) -> tuple[SandboxSession, tuple[str, ...]]:
        """Return a fork of a session, and the names that it lost. Raise `SessionNotSaved` if the program prevents
        it."""
        snapshot = await session.snapshot()
        try:
            forking = self._sandbox.fork(snapshot, session_id=self._new_id(), owner=self._owner, ttl_s=self._ttl_s)
            return await self._stack.enter_async_context(forking), snapshot.lost
        finally:
            await self._sandbox.drop(snapshot)

    async def _session(self, profile: str) -> SandboxSession:
        if profile not in self._sessions:
            opening = self._sandbox.session(
                profile, session_id=self._new_id(), owner=self._owner, ttl_s=self._ttl_s, tenant=self._key.run
            )
            self._sessions[profile] = await self._stack.enter_async_context(opening)
        return self._sessions[profile]

    @property
    def _owner(self) -> str:
        return f"{self._key.run}/{self._key.episode}"

    def _new_id(self) -> str:
        return f"{self._key.run}.{self._key.episode}.{self._key.attempt}.{next(self._numbers)}"

    async def __aenter__(self) -> Self:
        await self._stack.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(exc_type, exc, traceback)


def tool_schema(name: str, tool: ToolConfig) -> ToolSchema:
    """Return a tool as chat templates expect it. A tool without a configured schema takes one text."""
    argument = "text" if tool.function else "code"
    one_text = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    description = tool.description or ("" if tool.function else f"Run {tool.language} code and return its output.")
    function = {"name": name, "description": description, "parameters": tool.parameters or one_text}
    return {"type": "function", "function": function}


def result_text(result: ExecResult) -> str:
    """Return a result as one text for the model: the output, then the value or the error.

    The stderr of a program with an exit status is included (compilers, shells). Of a Python traceback only the last
    line is shown.
    """
    parts = [
        result.stdout.rstrip("\n"),
        result.stderr.rstrip("\n") if result.exit_status else "",
        result.result if result.outcome is ExecOutcome.OK else f"error: {result.error}",
    ]
    return "\n".join(part for part in parts if part)


def shorten(text: str, chars_max: int) -> str:
    """Return `text`, or its beginning and end with a mark between them, in at most `chars_max` characters."""
    if len(text) <= chars_max:
        return text
    mark = f"\n[{len(text) - chars_max} characters cut]\n"
    kept = max(0, chars_max - len(mark))
    head = kept - kept // 2
    return (text[:head] + mark + text[len(text) - kept // 2 :])[:chars_max]

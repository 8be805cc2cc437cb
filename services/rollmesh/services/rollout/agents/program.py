"""The agent that is a program of the user. It runs once per episode and calls the model over the OpenAI protocol.

    rollout:
      agent: {name: program, options: {command: [python, my_agent.py]}}

The program reads the task as JSON from its standard input (or the file `ROLLMESH_TASK`) and finds the model at
`OPENAI_BASE_URL` with `OPENAI_API_KEY`. Its last conversation is what scorers judge. It ends with exit code 0. All of
its processes end with the episode. Rewards that only the program knows are lines that it writes to the pipe
`ROLLMESH_REWARDS_FD`, see `reply_rewards`.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta

from rollmesh.services.rollout.agent import Agent, Task
from rollmesh.services.rollout.agents.reply_rewards import REWARD_BYTES_MAX, give_lines
from rollmesh.services.rollout.environment import Environment, ServedEpisode
from rollmesh.shared.config.extras import libraries_needed
from rollmesh.shared.config.settings import NonEmptyStr, PositiveFloat, Settings
from rollmesh.shared.errors import ConfigError, InfraFailure
from rollmesh.shared.process.process_launch import kept_tree, kill_with_variable

_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "USER", "LOGNAME", "SSL_CERT_FILE", "SSL_CERT_DIR")
"""Variables of the worker that programs get."""
_INTERPRETER = re.compile(r"(python|node|bash|sh)[\d.]*")
"""Programs whose first argument, if it is not an option, is the file that they execute."""
_KILL_S = 5.0
_OUTPUT_S = 1.0
"""Time in which the rest of the output of an exited program must arrive, seconds."""


class ProgramFailed(InfraFailure):
    """The program of an episode could not run, or failed."""

    reason = "PROGRAM_FAILED"


class ProgramOptions(Settings):
    """Options of the agent `program`."""

    command: Annotated[tuple[NonEmptyStr, ...], Meta(min_length=1)]
    """The program and its arguments. A word that is a file relative to the configuration file becomes its absolute
    path."""
    env: dict[str, str] = {}
    """Environment variables, in addition to PATH, HOME, the language, the time zone and those with the task and the
    model."""
    stop_s: PositiveFloat = 5.0
    """Time between SIGTERM and SIGKILL when the program has to end, and the time that it has to end after a limit of
    the episode, seconds."""
    output_bytes_max: Annotated[int, Meta(ge=256, le=1 << 20)] = 4096
    """The last bytes of its stdout and of its stderr that an error shows."""


class RunningProgram(asyncio.SubprocessProtocol):
    """The process of a program, as its event loop reports it. Its output is read as it comes, and only the last bytes
    are kept."""

    def __init__(self, output_bytes_max: int) -> None:
        self.exited = asyncio.Event()
        self.closed = asyncio.Event()
        """Set when it has exited and its pipes are closed."""
        self._keep = output_bytes_max
        self._kept = {1: b"", 2: b""}
        self._transport: asyncio.SubprocessTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.SubprocessTransport, transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._kept[fd] = (self._kept[fd] + data)[-self._keep :]

    def process_exited(self) -> None:
        self.exited.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()

    @property
    def exit_code(self) -> int:
        """The exit code, or the negative number of the signal that killed it."""
        return self._transport.get_returncode() or 0

    @property
    def outputs(self) -> str:
        """The ends of stdout and stderr, for an error."""
        texts = {name: self._kept[fd].decode(errors="replace").strip() for name, fd in (("stdout", 1), ("stderr", 2))}
        return "; ".join(f"{name}: {text or 'empty'}" for name, text in texts.items())

    def feed(self, document: bytes) -> None:
        """Write to its stdin, and close it. A program need not read it."""
        stdin = cast(asyncio.WriteTransport, self._transport.get_pipe_transport(0))
        stdin.write(document)
        stdin.write_eof()

    def stop(self) -> None:
        """Ask it to end, also if it is stopped."""
        with suppress(ProcessLookupError):
            self._transport.send_signal(signal.SIGCONT)
            self._transport.terminate()

    def close(self) -> None:
        """Close the pipes, and kill it if it runs."""
        self._transport.close()


class RewardPipe(asyncio.Protocol):
    """The pipe to which a program writes its rewards. It is not a standard stream, so that what the children of the
    program print does not get there. It is always read, so that the program does not wait."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = asyncio.Event()
        self.fd = -1
        """The end of the program. The worker closes it when the program has it."""
        self._transport: asyncio.ReadTransport | None = None

    @classmethod
    async def opened(cls) -> RewardPipe:
        reader, writer = os.pipe()
        pipe = cls()
        pipe.fd = writer
        file = os.fdopen(reader, "rb", 0)
        pipe._transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: pipe, file)
        return pipe

    def data_received(self, data: bytes) -> None:
        self.written += data[: REWARD_BYTES_MAX + 1 - len(self.written)]

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()

    def given(self) -> None:
        """Close the end of the program in this process."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def close(self) -> None:
        self.given()
        if self._transport is not None:
            self._transport.close()


class ProgramAgent(Agent):
    """Run the program on the task."""

    Options = ProgramOptions
    runs_elsewhere = True

    def __init__(self, *, options: ProgramOptions, base_dir: str | Path | None = None) -> None:
        """Raise ConfigError if the program or a library is not installed. Files are relative to `base_dir`."""
        with libraries_needed("the agent `program`"):
            import starlette  # noqa: F401
            import uvicorn  # noqa: F401
        base = Path(base_dir or ".").resolve()
        self._command = [str(base / word) if (base / word).is_file() else word for word in options.command]
        self._options = options
        path = options.env.get("PATH", os.environ.get("PATH"))
        if shutil.which(self._command[0], path=path) is None:
            raise ConfigError(
                "agent `program`: options.command[0] must be an executable file or a program on PATH, got "
                f"{self._command[0]!r}"
            )

        script = next(iter(self._command[1:]), "-")
        is_file = script.startswith("-") or (base / script).is_file()
        if _INTERPRETER.fullmatch(Path(self._command[0]).name) and not is_file:
            raise ConfigError(
                f"agent `program`: options.command[1] must be a file, because {self._command[0]} executes it, got "
                f"{script!r}: there is no {base / script}"
            )

    async def run(self, task: Task, env: Environment) -> None:
        async with env.serve() as api:
            pipe = await RewardPipe.opened()
            try:
                code, tails = await self._run(task, env, api, pipe)
                self._give(pipe, env, api, complete=not code)
            except asyncio.CancelledError:  # at the time limit, which scores the episode as it is
                try:
                    self._give(pipe, env, api, complete=False)
                except ProgramFailed as err:
                    env.fail(err)
                raise
            finally:
                pipe.close()
            api.check()
            if code or not api.num_turns:
                what = (
                    _ended(code)
                    if code
                    else "exited without a turn of the model; it must call the model at OPENAI_BASE_URL"
                )
                raise ProgramFailed(f"{self._command[0]} {what}; {tails}", command=self._command[0])

    def _give(self, pipe: RewardPipe, env: Environment, api: ServedEpisode, *, complete: bool) -> None:
        """Give the rewards that the program has written."""
        try:
            give_lines(pipe.written, env, api, complete=complete)
        except ValueError as err:
            raise ProgramFailed(
                f"{self._command[0]} has written a wrong reward: {err}", command=self._command[0]
            ) from err

    async def _run(self, task: Task, env: Environment, api: ServedEpisode, pipe: RewardPipe) -> tuple[int, str]:
        """Run the program until it or the episode ends; return its exit code and the ends of its outputs."""
        async with self._started(task_document(task, env), env, api, pipe) as program:
            ending = asyncio.ensure_future(api.wait_ended())
            exiting = asyncio.ensure_future(program.exited.wait())
            try:
                await asyncio.wait({exiting, ending}, return_when=asyncio.FIRST_COMPLETED)
                if not exiting.done():  # the episode has ended, so its requests fail from now on
                    await asyncio.wait({exiting}, timeout=self._options.stop_s)
                if not exiting.done():
                    program.stop()
                await exiting
                with suppress(TimeoutError):  # a process that has escaped may hold the pipes
                    async with asyncio.timeout(_OUTPUT_S):
                        await program.closed.wait()
                        await pipe.closed.wait()
            finally:
                exiting.cancel()
                ending.cancel()
        return program.exit_code, program.outputs

    @asynccontextmanager
    async def _started(
        self, document: bytes, env: Environment, api: ServedEpisode, pipe: RewardPipe
    ) -> AsyncIterator[RunningProgram]:
        """Start the program, and end all of its processes on every exit."""
        folder = tempfile.mkdtemp(prefix="rollmesh-program-")
        file = Path(folder) / "task.json"
        program = RunningProgram(self._options.output_bytes_max)
        try:
            file.write_bytes(document)
            await asyncio.get_running_loop().subprocess_exec(
                lambda: program,
                *kept_tree(self._command, folder=folder, stop_s=self._options.stop_s),
                env={**self._variables(env, api), "ROLLMESH_TASK": str(file), "ROLLMESH_REWARDS_FD": str(pipe.fd)},
                pass_fds=(pipe.fd,),
                start_new_session=True,
            )
            pipe.given()
        except BaseException as err:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(err, OSError):
                raise ProgramFailed(f"cannot start {self._command[0]}: {err.strerror or err}") from err
            raise
        try:
            program.feed(document)
            yield program
        finally:
            try:
                if not program.exited.is_set():
                    program.stop()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._options.stop_s + _KILL_S):
                            await program.exited.wait()
            finally:
                program.close()
                await asyncio.to_thread(_clean_up, file)

    def _variables(self, env: Environment, api: ServedEpisode) -> Mapping[str, str]:
        inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        return {
            **inherited,
            **self._options.env,
            "OPENAI_BASE_URL": api.base_url,
            "OPENAI_API_KEY": api.key,
            "ROLLMESH_MODEL": "policy",
            "ROLLMESH_EPISODE": env.key.episode,
        }


def task_document(task: Task, env: Environment) -> bytes:
    """Return the task as JSON: task_id, messages, tools as requests describe them, labels, extras, episode, attempt,
    index, purpose."""
    return msgspec.json.encode(task_fields(task, env))


def task_fields(task: Task, env: Environment) -> dict[str, Any]:
    """Return the task as JSON values."""
    return {
        "task_id": task.task_id,
        "messages": [{"role": message.role, "content": message.content} for message in task.messages],
        "tools": list(env.tool_schemas),
        "labels": dict(task.labels),
        "extras": dict(task.extras),
        "episode": env.key.episode,
        "attempt": env.key.attempt,
        "index": env.index,
        "purpose": env.purpose.name.lower(),
    }


def _clean_up(task_file: Path) -> None:
    """End what a keeper has left that was killed itself. A keeper that ended has deleted the folder."""
    if task_file.parent.exists():
        kill_with_variable("ROLLMESH_TASK", str(task_file))
        shutil.rmtree(task_file.parent, ignore_errors=True)


def _ended(code: int) -> str:
    if code == 127:
        return "cannot be run (exit code 127)"
    number = -code if code < 0 else code - 128
    return f"was killed by signal {number}" if number > 0 else f"exited with {code}, expected 0"

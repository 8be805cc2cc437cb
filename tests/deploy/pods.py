"""Containers of the rendered manifests as processes of this host: the same command lines and environment, other paths
and names.

Every pod gets a separate loopback address, so that all of them can listen on the ports of the manifests. DNS names
become these addresses, and the paths of volumes become folders. Where the user may, a process sees the host's root
read-only, except for its volume.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from .manifests import ROOT, Workload

NAMESPACE = "rollmesh"
PROBES, GRPC = 7401, 7400
START_S, POLL_S, RESTARTS_MAX = 120.0, 0.1, 5
_BIN = Path(sys.executable).parent
_READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,bind,ro / && mount -o remount,bind,rw "$0" && exec "$@"'


@cache
def can_mount() -> bool:
    """Whether this user may make the root of a process read-only."""
    probe = ["unshare", "--mount", "sh", "-c", _READ_ONLY, "/tmp", "true"]
    try:
        return subprocess.run(probe, capture_output=True, timeout=10, check=False).returncode == 0
    except OSError:
        return False


@dataclass
class Pods:
    """The pods of a test. `folder` has `secret`, `config`, `nats`, `models`, and a volume per pod."""

    folder: Path
    addresses: dict[str, str] = field(default_factory=dict)
    """Loopback address by pod."""
    network: str = field(default_factory=lambda: f"127.{secrets.randbelow(200) + 20}.{secrets.randbelow(256)}")
    """The pods of a test that runs at the same time are in another one."""

    def address_of(self, pod: str) -> str:
        return self.addresses.setdefault(pod, f"{self.network}.{len(self.addresses) + 1}")

    def volume(self, pod: str) -> Path:
        path = self.folder / "volumes" / pod
        path.mkdir(parents=True, exist_ok=True)
        return path

    def local(self, text: str, pod: str) -> str:
        """Return `text` of a manifest with the names and paths of this host."""
        service = pod.rpartition("-")[0] or pod
        here = self.address_of(pod)
        names = {f"{one}.{one.rpartition('-')[0]}.{NAMESPACE}.svc": at for one, at in self.addresses.items()}
        names |= {f"coordinator.{NAMESPACE}.svc": self.address_of("coordinator-0")}
        paths = {
            "/etc/rollmesh/secret": self.folder / "secret",
            "/etc/rollmesh/config": self.folder / "config",
            "/etc/rollmesh/nats": self.folder / "logins" / service,
            "/etc/nats": self.folder / "nats",
            "/models": self.folder / "models",
            "/var/lib/rollmesh": self.volume(pod),
            "/var/lib/nats": self.volume(pod),
        }
        for name, value in {**names, **{key: str(path) for key, path in paths.items()}, "0.0.0.0": here}.items():
            text = text.replace(name, value)
        return text

    def environment(self, workload: Workload, pod: str) -> dict[str, str]:
        """Return the environment of the container."""
        found = {"POD_NAME": pod, "POD_NAMESPACE": NAMESPACE}
        for entry in workload.container["env"]:
            if "value" in entry:
                found[entry["name"]] = self.local(_expand(entry["value"], found), pod)
        return found

    def command(self, workload: Workload, pod: str) -> list[str]:
        """Return the command line of the container, as the entry point of the image would run it."""
        container, environment = workload.container, self.environment(workload, pod)
        program = container.get("command", ["rollmesh"])
        return [str(_BIN / program[0]), *(self.local(_expand(arg, environment), pod) for arg in container["args"])]

    def pre_stop(self, workload: Workload, pod: str) -> list[str] | None:
        """Return the command of the hook; None without one."""
        hook = workload.container.get("lifecycle", {}).get("preStop")
        return [self.local(arg, pod) for arg in hook["exec"]["command"]] if hook else None

    async def start(self, workload: Workload, pod: str, *more: str) -> Pod:
        """Start the container; `more` are further arguments."""
        command = [*self.command(workload, pod), *more]
        volume = self.volume(pod)
        if can_mount():
            command = ["unshare", "--mount", "sh", "-c", _READ_ONLY, str(volume), *command]
        environment = self.process_environment(workload, pod)
        log = (self.folder / f"{pod}.log").open("ab")
        with log:
            process = await asyncio.create_subprocess_exec(*command, env=environment, cwd=ROOT, stdout=log, stderr=log)
        return Pod(pod, workload, process, self)

    def process_environment(self, workload: Workload, pod: str) -> dict[str, str]:
        path = f"{_BIN}:{os.environ['PATH']}"
        own = {"PATH": path, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        return {**own, **self.environment(workload, pod)}


@dataclass
class Pod:
    """A running container."""

    name: str
    workload: Workload
    process: asyncio.subprocess.Process
    pods: Pods
    restarts: int = 0

    @property
    def log(self) -> str:
        return (self.pods.folder / f"{self.name}.log").read_text(errors="replace")

    async def until_ready(self) -> None:
        """Wait until the readiness probe of the manifest succeeds."""
        probe = self.workload.container["readinessProbe"]["grpc"]
        async with asyncio.timeout(START_S):
            while not await self.serves(probe["service"]):
                await self._restart_if_failed()
                await asyncio.sleep(POLL_S)

    async def until_finished(self, limit_s: float) -> None:
        """Wait until the container has exited with code 0."""
        async with asyncio.timeout(limit_s):
            while await self.process.wait():
                await self._restart_if_failed()

    async def _restart_if_failed(self) -> None:
        """Restart a container as the kubelet does, for example after a start without an answer of NATS. Invalid input
        fails the test."""
        code = self.process.returncode
        if code is not None:
            assert code == 1, f"{self.name} exited with {code}: {self.log}"
            self.restarts += 1
            assert self.restarts <= RESTARTS_MAX, f"{self.name} keeps failing: {self.log}"
            self.process = (await self.pods.start(self.workload, self.name)).process

    async def serves(self, service: str = "") -> bool:
        """Return the answer to a gRPC probe as the kubelet sends it: without TLS and without token."""
        port = self.workload.container["livenessProbe"]["grpc"]["port"]
        async with grpc.aio.insecure_channel(f"{self.pods.address_of(self.name)}:{port}") as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5.0)
            except grpc.aio.AioRpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def delete(self) -> float:
        """Delete the pod as Kubernetes does: preStop, SIGTERM, and SIGKILL after the grace period. Return the seconds
        from SIGTERM to the exit."""
        clock = asyncio.get_running_loop().time
        if hook := self.pods.pre_stop(self.workload, self.name):
            environment = self.pods.process_environment(self.workload, self.name)
            done = await asyncio.create_subprocess_exec(*hook, env=environment, cwd=ROOT)
            async with asyncio.timeout(START_S):  # the interpreter starts slowly on a busy host
                await done.wait()
        began = clock()
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(self.workload.grace_s):
            await self.process.wait()
        return clock() - began

    def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()


def _expand(text: str, environment: dict[str, str]) -> str:
    """Replace $(NAME) as the kubelet does."""
    for name, value in environment.items():
        text = text.replace(f"$({name})", value)
    return text

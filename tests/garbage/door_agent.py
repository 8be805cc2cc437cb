"""An agent whose episode is served over HTTP. It writes the address of the server of its worker to a file."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

from rollmesh.services.rollout.agent import Environment, Task

ADDRESS_FILE = "ROLLMESH_GARBAGE_DOOR"
"""Environment variable with the path of the file."""


class Served:
    """One chat completion through the server."""

    async def run(self, task: Task, env: Environment) -> None:
        async with env.serve() as api:
            where, prefix = api.base_url.removeprefix("http://").split("/")
            host, _, port = where.rpartition(":")
            body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "1+1"}]}).encode()
            lines = [f"POST /{prefix}/chat/completions HTTP/1.1", f"Host: {where}", f"Authorization: Bearer {api.key}"]
            lines += ["Connection: close", f"Content-Length: {len(body)}", "", ""]
            async with asyncio.timeout(30):
                reader, writer = await asyncio.open_connection(host, int(port))
                try:
                    writer.write("\r\n".join(lines).encode() + body)
                    reply = await reader.read()
                finally:
                    writer.close()
            assert reply.startswith(b"HTTP/1.1 200 "), reply[:200]
            await asyncio.to_thread(Path(os.environ[ADDRESS_FILE]).write_text, where)

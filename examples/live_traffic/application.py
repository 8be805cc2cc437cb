"""An application that trains the model that answers its users.

Each chat is one episode, and the thumb of the user comes later, over another connection:

    python application.py HOST:PORT RUN_FOLDER RUN [NUM_CHATS]

Users and thumbs are scripted here. It needs `pip install openai`. An application in another language makes the same two
calls, OpenEpisode and FinishEpisode of `run.proto`, and any HTTP request to the chat.
"""

import asyncio
import sys
import uuid
from pathlib import Path

from openai import AsyncOpenAI

from rollmesh.client import Client
from rollmesh.shared.errors import EpisodeLost, EpisodeOver

TURNS = ("What is 2+3?", "Are you sure?")


async def chat(run, key):
    """Chat with a user; return the name of the episode and the last answer."""
    async with run.episode(key) as episode:  # an error in here drops the episode
        client = AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key)
        messages = []
        for said in TURNS:
            messages.append({"role": "user", "content": said})
            reply = await client.chat.completions.create(model=episode.model, messages=messages)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        return episode.lease_id, messages[-1]["content"]


async def rate(run, lease_id, answer):
    """Pass on the thumb of the user."""
    try:
        await run.finish_episode(lease_id, {"liked": float("5" in answer)})
        print(f"rated {lease_id}")
    except (EpisodeLost, EpisodeOver) as error:  # it does not count; a user does not chat again for it
        print(f"no sample: {error}")


async def main(address, folder, name, num_chats):
    token = (Path(folder) / "token").read_text().strip()
    async with Client(address, token=token) as app, Client(address, token=token) as feedback:
        chats = (chat(app.run(name), f"chat-{uuid.uuid4()}") for _ in range(num_chats))
        answers = await asyncio.gather(*chats)
        await asyncio.gather(*(rate(feedback.run(name), *answer) for answer in answers))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4], int(sys.argv[4]) if len(sys.argv) > 4 else 8))

"""A program that works on one episode of a round. It calls the model twice over HTTP, and writes a line to the journal
when it begins and ends.

It runs in an interpreter without site packages. The number of the episode in its group decides how it behaves.
"""

import http.client
import json
import os
import subprocess
import sys
import time
from urllib.parse import urlsplit

TALKS, LEAVES_A_CHILD, FAILS_ONCE, WRITES_GARBAGE, CHANGES_ITS_HISTORY, ASKS_TWICE = range(6)
THINK_S = float(os.environ["CHAOS_THINK_S"])
BASE_URL, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]


def started(pid: int) -> tuple[int, int]:
    """Return the parent and the start of a process, in clock ticks."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return int(fields[1]), int(fields[19])


def note(**fields: object) -> None:
    line = json.dumps({"episode": task["episode"], "attempt": task["attempt"], "pid": os.getpid(), **fields})
    journal = os.open(os.environ["CHAOS_JOURNAL"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(journal, line.encode() + b"\n")


def ask(messages: list[dict[str, str]]) -> dict[str, str]:
    """Return the reply of the model. Exit if there is none."""
    place = urlsplit(BASE_URL)
    connection = http.client.HTTPConnection(str(place.hostname), place.port)
    body = json.dumps({"model": "policy", "messages": messages})
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    connection.request("POST", f"{place.path}/chat/completions", body, headers)
    reply = connection.getresponse()
    said = reply.read()
    connection.close()
    if reply.status != 200:
        sys.exit(f"status {reply.status}: {said.decode()}")
    turn: dict[str, str] = json.loads(said)["choices"][0]["message"]
    return turn


task = json.load(sys.stdin)
keeper, start = started(os.getpid())
children = []
if task["index"] == LEAVES_A_CHILD:
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    children.append([child.pid, started(child.pid)[1]])
note(what="begun", start=start, worker=started(keeper)[0], url=BASE_URL, key=KEY, folder=os.getcwd(), children=children)
if task["index"] == WRITES_GARBAGE:
    os.write(1, os.urandom(300_000))
    os.write(2, b"\xff" * 300_000)

messages = task["messages"]
first = ask(messages)
time.sleep(THINK_S)
if task["index"] == FAILS_ONCE and task["attempt"] == 1:
    note(what="failed")
    sys.exit(3)
if task["index"] == ASKS_TWICE:
    ask(messages)
if task["index"] == CHANGES_ITS_HISTORY:
    first = {"role": "assistant", "content": "changed"}
ask([*messages, first, {"role": "user", "content": "go on"}])
note(what="done")

"""An agent that uses the public `openai` package and nothing of this project: it lets the model call a calculator until
it answers.

    python agent.py [--stream]               one task from standard input; the mesh starts it once per episode
    python agent.py [--stream] --serve PORT  a service that gets tasks by POST /run, as for `rollout.agent: {name: url, ...}`

`OpenAI()` reads the address and the key of the model from the environment. It needs `pip install openai`.
"""  # noqa: E501, W505

import ast
import json
import operator
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from openai import OpenAI, OpenAIError

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
STREAM = "--stream" in sys.argv


def calculate(node):
    """Return the value of an expression of whole numbers."""
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](calculate(node.left), calculate(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -calculate(node.operand)
    return int(node.value)


def calculator(arguments):
    """Return the result of a call as text for the model."""
    try:
        expression = next(iter(json.loads(arguments).values()))
        return str(calculate(ast.parse(expression, mode="eval").body))
    except (ValueError, KeyError, SyntaxError, StopIteration, TypeError, AttributeError) as error:
        return f"error: {error}"


def ask(client, messages, tools):
    """Return the next message of the model."""
    request = {"model": "policy", "messages": messages, "tools": tools}
    if not STREAM:
        return client.chat.completions.create(**request).choices[0].message
    with client.chat.completions.stream(**request) as events:
        return events.get_final_completion().choices[0].message


def work(client, task):
    """Solve a task."""
    messages = task["messages"]
    for _ in range(8):
        turn = ask(client, messages, task["tools"])
        messages.append(turn.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
        if not turn.tool_calls:
            break
        for call in turn.tool_calls:
            result = calculator(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


class Service(BaseHTTPRequestHandler):
    """Replies when the task is done."""

    client = OpenAI(base_url="http://unused", api_key="unused") if "--serve" in sys.argv else None
    """Keeps connections open between tasks, each of which has its own address and key."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            work(self.client.with_options(base_url=body["base_url"], api_key=body["api_key"]), body["task"])
            status, text = 200, b""
        except OpenAIError as error:
            status, text = 500, str(error).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format, *args):
        pass


class Server(ThreadingHTTPServer):
    """Accepts as many connections at once as a mesh opens."""

    request_queue_size = 128


if "--serve" in sys.argv:
    server = Server(("127.0.0.1", int(sys.argv[sys.argv.index("--serve") + 1])), Service)
    print(server.server_address[1], flush=True)
    server.serve_forever()
else:
    work(OpenAI(), json.load(sys.stdin))

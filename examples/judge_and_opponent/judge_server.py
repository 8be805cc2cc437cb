"""A judge as a server of the OpenAI chat protocol, in place of a large model: `python judge_server.py [PORT]`.

It scores as many models do: two answers that are equally good get about 0.5, and the same question does not get the
same score twice. It needs only the standard library.
"""

import json
import random
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def score(question):
    """Return the score in [0, 1] of answer A of a question of `duel.py`, with noise."""
    task, mine, theirs = (re.search(rf"^{name}: (.*)$", question, re.MULTILINE)[1] for name in ("Task", "A", "B"))
    numbers = re.findall(r"\d+", task)
    right = max(numbers, key=int)
    quality = {number: 0.5 for number in numbers} | {right: 1.0}
    even = 0.5 + (quality.get(mine, 0.0) - quality.get(theirs, 0.0)) / 2
    return min(max(even + random.uniform(-0.05, 0.05), 0.0), 1.0)


class Judge(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = request["messages"][-1]["content"]
        said = json.dumps({"score": score(question)})
        words, reported = len(question.split()), len(said.split())  # the words are the tokens of this judge
        body = {
            "id": "chatcmpl-judge",
            "object": "chat.completion",
            "model": request["model"],
            "choices": [{"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": words, "completion_tokens": reported, "total_tokens": words + reported},
        }
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 128  # connections that wait; with the default of 5, others are delayed by a second


if __name__ == "__main__":
    server = Server(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 8077), Judge)
    print(f"http://127.0.0.1:{server.server_port}/v1", flush=True)
    server.serve_forever()

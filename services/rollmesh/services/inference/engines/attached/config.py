"""Configuration of an engine that attaches to a running server. Importable without an HTTP library, so that `check`
stays fast."""

from __future__ import annotations

from urllib.parse import urlsplit

from rollmesh.shared.config.settings import NonEmptyStr, PositiveFloat, PositiveInt, Settings


class AttachedConfig(Settings):
    """A running server, the folder through which it gets weights, sizes and timeouts."""

    url: NonEmptyStr
    """Address of the server, for example `http://10.0.0.7:30000`. The server must serve this node alone, because each
    update of the weights changes them for all its clients."""
    model: str
    """Folder with the `config.json` of the model that the server runs, and with `tokenizer.json` if stop strings are
    used. A mesh sets it to the model of the run."""
    weights_dir: NonEmptyStr
    """Absolute path of a folder for the weights of prepared versions, used by this node alone, on a file system that
    the server reads."""
    weights_dir_at_server: str = ""
    """Path of `weights_dir` on the server's machine or in its container. Empty: the same path."""
    api_key_file: str = ""
    """File with the server's API key. It is read at the start, sent as a bearer token, and never logged. Empty: no
    key."""
    context_max: PositiveInt = 1024
    """Most tokens of a sequence, prefix and new tokens together. At least one less than the server's limit, because the
    server samples a token when it scores a sequence."""
    slots_max: PositiveInt = 64
    """Most requests at the server at once, each with a connection. Set it to the server's own limit of running
    requests."""
    queue_max: PositiveInt = 1024
    """Most requests that wait in this node for a slot; one more is rejected with EngineBusy."""
    prepared_max: PositiveInt = 2
    """Most prepared versions; preparing one more drops the oldest of them."""
    flush_tokens: PositiveInt = 8
    """Tokens per message of the server. A larger value costs less per token, a smaller one loses less if the node
    crashes."""
    connect_s: PositiveFloat = 60.0
    """Time that the server has to become reachable when the node starts, in seconds."""
    call_s: PositiveFloat = 10.0
    """Deadline of a short call, and of the end of an aborted request, in seconds."""
    idle_s: PositiveFloat = 120.0
    """Longest time without a message of a running request, in seconds; beyond it, the request ends with ERROR. It
    includes the time that the request waits at the server."""
    score_s: PositiveFloat = 60.0
    """Deadline for scoring one sequence, in seconds."""
    update_s: PositiveFloat = 300.0
    """Deadline of one update of the weights at the server, in seconds. `inference.activate_s` holds for the whole
    activation."""
    poll_s: PositiveFloat = 2.0
    """Time between two polls of the server's weight version and load, in seconds."""
    dead_s: PositiveFloat = 30.0
    """Time without a response to a poll after which the server counts as dead, in seconds. The node then needs a
    restart, because a restarted server has other weights."""

    def check_fields(self) -> None:
        if not self.weights_dir.startswith("/"):
            raise ValueError(
                f"`weights_dir` must be an absolute path, because the server reads it too, got {self.weights_dir!r}"
            )
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"`url` must be http://HOST:PORT or https://HOST:PORT, got {self.url!r}")
        if parts.username is not None or parts.query or parts.fragment:
            raise ValueError("`url` must not contain a user, a query or a fragment; put a key into `api_key_file`")

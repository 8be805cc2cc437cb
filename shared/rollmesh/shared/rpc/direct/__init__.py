"""Calls between a client and a server on one event loop, without a socket. `channel` is the client's side, `server` the other."""

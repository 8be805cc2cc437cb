"""Code that several services need: domain types, errors, time, config, RPC and bus. It imports `rollmesh.v1` only."""

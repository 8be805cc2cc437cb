"""What two parts of the mesh need: domain types, errors, time, config, RPC and bus. Imports `rollmesh.v1` only."""

"""The words of the mesh as types: trajectories, versions, ids, digests, names of outputs and sources, facts of the
ledger. Imports no networking."""

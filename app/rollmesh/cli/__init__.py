"""The `rollmesh` command. Only its sub-commands import modules that take long to load."""

"""The `rollmesh` command: what a person starts, watches and reads. Only sub-commands import heavy parts."""

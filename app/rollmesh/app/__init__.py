"""What the command line and the Python API both use: open a run folder, run a session, read what is stored. Imports no
command."""

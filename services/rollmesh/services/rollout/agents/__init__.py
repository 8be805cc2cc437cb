"""The agents that come with the mesh; a user's own is named in the config as `file.py:Name`."""

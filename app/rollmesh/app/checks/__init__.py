"""Checks of a configuration, its model, its tools and this host, before a run starts."""

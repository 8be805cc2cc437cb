"""The sandbox service: leased sessions over an engine that creates jails."""

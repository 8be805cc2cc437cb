"""The sandbox service: sessions with leases over an engine that makes jails."""

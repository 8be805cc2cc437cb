"""Engines, one folder each, loaded by dotted name; heavy libraries are imported by the engine that needs them alone."""

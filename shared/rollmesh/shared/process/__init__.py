"""This process: start, signals, information, points at which a test injects a fault."""

"""Built-in scorers, one per file."""

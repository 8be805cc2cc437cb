"""Domain types to and from their bytes: strict on the way in, deterministic on the way out."""

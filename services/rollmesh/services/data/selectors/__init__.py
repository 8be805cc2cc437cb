"""Built-in selectors, one per file."""

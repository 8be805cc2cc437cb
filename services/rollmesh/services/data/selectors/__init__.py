"""Which task is drawn next; one idea per file."""

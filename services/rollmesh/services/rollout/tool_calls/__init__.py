"""Parsers of the tool calls that a model writes: from the text of a turn to content and calls, at once or as it
streams."""

"""What a run shows: its measures over time, the live display, the summary, figures and the report."""

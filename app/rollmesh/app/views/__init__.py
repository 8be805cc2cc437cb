"""What a mesh and a run show: state, versions, measures over time, the live display, the summary, figures and the
report."""

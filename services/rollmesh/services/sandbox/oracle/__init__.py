"""Hidden tests: manifests, their store, and judgments whose verdicts no candidate can forge."""

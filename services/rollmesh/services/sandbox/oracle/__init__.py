"""Hidden tests: manifests, their store, and judgments whose verdict no candidate can forge."""

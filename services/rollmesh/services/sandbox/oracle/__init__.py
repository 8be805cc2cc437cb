"""Hidden tests: manifests, their store, and judgements whose verdict no candidate can forge."""

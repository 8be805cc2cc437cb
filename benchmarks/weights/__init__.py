"""`python -m benchmarks weights` and `publish_to_active`: fan-out, deltas, and the time from publication to use."""

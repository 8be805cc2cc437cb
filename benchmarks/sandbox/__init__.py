"""`python -m benchmarks sandbox`: a session against a bare fork and other isolations."""

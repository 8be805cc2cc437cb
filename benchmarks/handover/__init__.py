"""`python -m benchmarks handover`: samples from worker to learner, against Ray."""

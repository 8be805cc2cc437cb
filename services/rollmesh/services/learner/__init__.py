"""The learner: drives a trainer over RunService, exactly as an external one would."""

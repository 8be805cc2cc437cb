"""The learner runs a trainer over RunService, with the same calls as an external trainer."""

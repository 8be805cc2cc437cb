"""Rollout workers: they lease episodes, run agents on them, score them and report them."""

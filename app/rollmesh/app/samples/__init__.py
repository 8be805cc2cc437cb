"""Samples of a run: recorded ones, exports of a run without a learner, and scores."""

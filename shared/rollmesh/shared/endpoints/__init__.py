"""Endpoints: models without a learner that agents, scorers and task sources may ask."""

"""Supervised fine-tuning of a model on a user's own conversations, with the trainer of reinforcement learning."""

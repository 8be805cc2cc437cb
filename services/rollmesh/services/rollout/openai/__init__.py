"""The OpenAI-compatible server of a rollout worker: programs and services call it as the model of their episode."""

"""The gateway serves RunService with payloads, so that trainers need neither NATS nor Python."""

"""The gateway: RunService for trainers, with payloads; they need neither NATS nor Python."""

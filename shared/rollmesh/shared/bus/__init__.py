"""The durable log: the port, its JetStream implementation, and the embedded server."""

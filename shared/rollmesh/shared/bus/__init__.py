"""The log that outlives its speakers: the port, its JetStream and in-memory forms, and the embedded server."""

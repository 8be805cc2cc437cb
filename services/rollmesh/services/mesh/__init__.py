"""The mesh in one process: every service on real gRPC and a real nats-server, engines by name."""

"""What calls need beside gRPC: HTTP links, the ASGI server, ports, retries."""

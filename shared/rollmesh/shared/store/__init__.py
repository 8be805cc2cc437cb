"""Files: free room, lines of JSON, payloads, permissions."""

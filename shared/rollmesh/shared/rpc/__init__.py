"""gRPC servers and channels as every part of the mesh builds them, and the interceptors around each call."""

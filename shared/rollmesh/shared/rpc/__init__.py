"""The gRPC servers and channels that every service uses, and the interceptors around each call."""

"""Inference: engines behind one port, and the service that puts them on the mesh."""

"""Weights as content-addressed blobs: the store, the manifest, the transfer. Knows bytes and digests, never tensors."""

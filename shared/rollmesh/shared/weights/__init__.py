"""Weights as content-addressed blobs: the store, the manifest, the transfer. It handles bytes and digests, not
tensors."""

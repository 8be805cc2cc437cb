"""The engine that computes models with torch in the node's process."""

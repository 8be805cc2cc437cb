"""Write the streams and payloads of a run folder to one file, and restore them."""

"""What the demo needs besides the mesh: its tiny model, its tokenizer and the supervised warm start."""

"""The demo: its task families, its tiny model, its tokenizer and the supervised warm start."""

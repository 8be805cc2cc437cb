"""Task families of the demo: each file has the generator, the task source and the oracle of one family."""

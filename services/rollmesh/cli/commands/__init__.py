"""The sub-commands, by what a person wants; each file registers its own on `app`. Heavy imports stay inside the functions."""

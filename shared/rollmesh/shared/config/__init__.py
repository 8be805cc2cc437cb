"""Configuration: settings types, the loader of files, extensions that are chosen by name, and how a user's code is
loaded and called."""

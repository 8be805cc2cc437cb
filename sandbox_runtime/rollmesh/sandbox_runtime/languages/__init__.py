"""The languages of a session: one file per language behind the port of `port`, found by name in `registry`. Inside the jail."""

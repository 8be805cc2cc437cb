"""The languages of a session, inside the jail: one module per language behind the port in `port`, found by name in
`registry`."""

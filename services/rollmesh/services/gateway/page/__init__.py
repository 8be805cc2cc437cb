"""The live page of a mesh: an HTTP server in the gateway process that shows runs, nodes and samples in a browser."""

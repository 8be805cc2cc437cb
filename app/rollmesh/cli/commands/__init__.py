"""One module per command, named after it; importing a module registers its command on `app`.

Imports that take time stay inside the functions. Logic with many such imports is in a module of `rollmesh.app`.
"""

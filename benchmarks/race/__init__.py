"""`python -m benchmarks race`: TRL, a loop without a mesh, and the mesh, on the same task."""

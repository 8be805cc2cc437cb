"""The jail: one module per kernel mechanism, `contain` that applies them in order, and the zygote that forks sessions
into it."""

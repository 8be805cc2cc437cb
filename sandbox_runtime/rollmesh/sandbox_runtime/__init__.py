"""The jail: one file per kernel mechanism, `contain` that orders them, and the zygote that forks sessions into it."""

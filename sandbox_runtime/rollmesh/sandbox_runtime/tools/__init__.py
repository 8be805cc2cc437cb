"""Tool modules a profile may preload into its zygote; they run inside the jail, standard library only."""

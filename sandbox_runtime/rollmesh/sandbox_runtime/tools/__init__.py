"""Tool modules that a profile may preload into its zygote. They run inside the jail and use the standard library
only."""

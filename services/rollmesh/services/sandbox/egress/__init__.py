"""Egress: what sessions of a profile may reach outside, through a proxy on the service's side. None unless a profile names a policy."""

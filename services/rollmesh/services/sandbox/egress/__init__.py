"""Egress: network access of a profile's sessions through a proxy in the service. There is no access unless a profile
names a policy."""

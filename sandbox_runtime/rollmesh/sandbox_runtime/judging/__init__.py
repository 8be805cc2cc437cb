"""Code of judgments that runs inside jails: the candidate's side of each request, and the oracle's side.

Every zygote imports it before it is contained, so that sessions can use it without files. Standard library only.
"""

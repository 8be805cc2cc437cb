"""Code of judgments that runs inside jails: the candidate's side of each question, and the oracle's own.

Imported by every zygote before it is contained, so that sessions find it without a file. Standard library only.
"""

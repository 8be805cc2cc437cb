"""Generators of reference pages, dashboards and alerts: what developers run. Not in the wheel."""

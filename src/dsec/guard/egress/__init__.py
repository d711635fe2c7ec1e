"""Egress: what a sandbox may reach, enforced outside it. docs/egress.md."""

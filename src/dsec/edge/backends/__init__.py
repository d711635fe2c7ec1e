"""Backends: ways to start a supervisor, and to clean up without it."""

"""Thin, typed doors to the kernel and to host programs. Nothing here knows what a sandbox is."""

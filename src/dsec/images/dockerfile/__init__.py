"""Environments from a Dockerfile. docs/oci.md."""

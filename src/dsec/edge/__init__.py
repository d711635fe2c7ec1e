"""The edge: admission, journal, leases and life cycle of the sandboxes of one node. See docs/edge.md."""

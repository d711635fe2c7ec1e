"""Adapters on the SDK: other platforms' protocols, spoken to sandboxes of dsec."""

"""Secrets by name: kept on the node, given to sandboxes as files of a tmpfs or added to their requests by a proxy. docs/secrets.md.

    store    where they are kept
    proxy    requests that carry one, which the sandbox never sees
"""

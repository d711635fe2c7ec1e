"""The E2B wire: unmodified `e2b` clients work with sandboxes of a dsec node. A process of its own beside the node: `dsec e2b serve`.

    app.py          one request to its handler: control plane, or a sandbox's envd by host name, header, token or signature
    boxes.py        the sandboxes of this face: what it remembers of each, and their timeouts
    control.py      /sandboxes and /v2/sandboxes;  logs.py: what happened in one
    templates.py    aliases, snapshots;  builds.py: template builds
    process.py      envd's process.Process;  filesystem.py: filesystem.Filesystem;  files.py: /files
    connect.py      envd's protocol: Connect with JSON
    models.py       request bodies: a field that is not there is refused
    errors.py, keys.py, http.py

It owns nothing that is not in the node: tokens are derived from the key of the face, what belongs to a sandbox is in its labels.
"""

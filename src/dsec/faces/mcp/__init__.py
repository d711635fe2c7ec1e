"""An MCP server: a model makes sandboxes and works in them, by tools. `dsec mcp` (stdio), `dsec mcp --http HOST:PORT`.

    serve.py    the process: both transports, who may call, what happens when a client goes
    tools.py    the tools: what each takes and what a model is shown
    boxes.py    whose sandboxes and snapshots there are

Needs the official `mcp` package: `pip install '.[mcp]'`. boxes.py does without.
"""

"""OpenAI Agents SDK: `RunConfig(sandbox=SandboxRunConfig(client=DsecSandboxClient()))`.

    client.py     makes sandboxes, finds them again, ends them
    session.py    one sandbox: commands, files, the workspace as an archive
    pty.py        commands that go on between two calls, on a terminal or not
"""

from dsec.faces.openai_agents.client import DsecSandboxClient
from dsec.faces.openai_agents.session import DsecSandboxClientOptions, DsecSandboxSession, DsecSandboxSessionState

__all__ = ["DsecSandboxClient", "DsecSandboxClientOptions", "DsecSandboxSession", "DsecSandboxSessionState"]

"""SWE-ReX: a deployment and a runtime on dsec's own commands and terminals. Nothing of SWE-ReX is installed in the sandbox.

    deployment = DsecDeployment(image="my/task")
    await deployment.start()
    await deployment.runtime.create_session(CreateBashSessionRequest())

    deployment.py    DsecDeployment: a sandbox from start to stop
    runtime.py       DsecRuntime: commands, files, sessions by name
    session.py       one bash on a terminal, interactive programs in it
"""

from dsec.faces.swerex.deployment import DsecDeployment, DsecDeploymentConfig
from dsec.faces.swerex.runtime import DsecRuntime

__all__ = ["DsecDeployment", "DsecDeploymentConfig", "DsecRuntime"]

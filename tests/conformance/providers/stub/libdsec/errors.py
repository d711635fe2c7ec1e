"""Names only."""


class DSecError(Exception):
    """Never raised."""


BinaryNotFound = CwdNotFound = NoMemory = NotExecutable = PidsLimit = SandboxDamaged = SandboxLost = DSecError

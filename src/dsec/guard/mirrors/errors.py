"""How a request to a mirror ends when it does not end with what was asked for."""

from __future__ import annotations


class Failed(Exception):
    """Answer with this status and one line of text."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class NotThere(Failed):
    """What the policy hides and what never was look alike."""

    def __init__(self) -> None:
        super().__init__(404, "not found")


class Hidden(NotThere):
    """The policy hides it: to the client as if it never was, for the sandbox's record something else."""

"""Words of a Dockerfile's instruction: quotes, and variables as `$NAME`, `${NAME}`, `${NAME:-word}`, `${NAME:+word}`, `${NAME:?word}`.

Nothing is split again after a variable was put in. https://docs.docker.com/reference/dockerfile/#environment-replacement
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPERATORS = ("-", "+", "?")


class BadWord(ValueError):
    """A quote or a brace without its end, or a modifier that is none."""


def split(text: str, variables: Mapping[str, str] | None, escape: str = "\\") -> list[str]:
    """The words of a text, quotes removed. `variables`: None leaves `$` alone."""
    return _Reader(text, variables, escape).words()


def expand(text: str, variables: Mapping[str, str], escape: str = "\\") -> str:
    """The whole text as one word."""
    return _Reader(text, variables, escape).word(stop="")


class _Reader:
    def __init__(self, text: str, variables: Mapping[str, str] | None, escape: str) -> None:
        self._text, self._variables, self._escape = text, variables, escape
        self._at = 0

    def words(self) -> list[str]:
        """All of them."""
        found: list[str] = []
        while True:
            while self._peek() in (" ", "\t", "\n"):
                self._at += 1
            if self._at >= len(self._text):
                return found
            found.append(self.word(stop=" \t\n"))

    def _peek(self) -> str:
        return self._text[self._at] if self._at < len(self._text) else ""

    def _next(self) -> str:
        found = self._peek()
        self._at += 1
        return found

    def word(self, stop: str) -> str:
        """Up to one of `stop`, which is left, or to the end."""
        out = []
        while (char := self._peek()) and char not in stop:
            self._at += 1
            if char == "'":
                out.append(self._quoted())
            elif char == '"':
                out.append(self._double())
            elif char == self._escape:
                out.append(self._next())
            elif char == "$" and self._variables is not None:
                out.append(self._variable())
            else:
                out.append(char)
        return "".join(out)

    def _quoted(self) -> str:
        end = self._text.find("'", self._at)
        if end < 0:
            raise BadWord("a single quote has no end")
        found, self._at = self._text[self._at : end], end + 1
        return found

    def _double(self) -> str:
        out = []
        while (char := self._next()) != '"':
            if not char:
                raise BadWord("a double quote has no end")
            if char == self._escape and self._peek() in ('"', "$", self._escape):
                out.append(self._next())
            elif char == "$" and self._variables is not None:
                out.append(self._variable())
            else:
                out.append(char)
        return "".join(out)

    def _variable(self) -> str:
        assert self._variables is not None
        if self._peek() != "{":
            found = _NAME.match(self._text, self._at)
            if found is None:
                return "$"
            self._at = found.end()
            return self._variables.get(found[0], "")
        self._at += 1
        name = _NAME.match(self._text, self._at)
        if name is None:
            raise BadWord("a variable in braces has no name")
        self._at = name.end()
        value = self._variables.get(name[0])
        if self._peek() == "}":
            self._at += 1
            return value or ""
        colon = self._peek() == ":"
        self._at += colon
        operator = self._next()
        if operator not in _OPERATORS or not operator:
            raise BadWord(f"${{{name[0]}}}: only :- :+ :? - + ? may follow the name")
        word = self.word(stop="}")
        if self._next() != "}":
            raise BadWord(f"${{{name[0]} has no closing brace")
        there = bool(value) if colon else value is not None
        if operator == "+":
            return word if there else ""
        if there:
            return value or ""
        if operator == "?":
            raise BadWord(f"{name[0]}: {word or 'it is not set'}")
        return word

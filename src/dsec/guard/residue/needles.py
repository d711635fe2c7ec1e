"""Looking for canaries and answers in bytes. What is looked at is an agent's: it is only read, and every bound is ours.

A canary's token is found as it is, in any case, in hexadecimal, in base64 at each of its three alignments, and reversed. An answer is found
exactly and encoded the same way, and by similarity: the words of both, without white space, are cut in sequences of `WORDS`, and the share
of the answer's sequences that a text has says how much of it is there.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from libdsec.residue import Finding

WORDS = 5  # of a sequence
LEAST_WORDS = 12  # of an answer that similarity is asked for
LEAST_EXACT = 6  # characters of an answer that is looked for at all
MOST_SHOWN = 160  # characters of an excerpt
_WORD = re.compile(r"[^\W_]+|[^\w\s]|_", re.UNICODE)
_SPACE = re.compile(r"\s+")


@dataclass(frozen=True, slots=True)
class Needle:
    """One thing to be found."""

    kind: str  # canary, answer
    name: str
    text: str


class Needles:
    """All that one scan looks for."""

    def __init__(self, canaries: Mapping[str, str], answers: Mapping[str, str], similarity: float = 0.6) -> None:
        """`canaries`: name by token. `answers`: text by name."""
        self._similarity = similarity
        self._forms: dict[bytes, tuple[Needle, str]] = {}
        self._shingles: dict[str, frozenset[tuple[str, ...]]] = {}
        for token, name in canaries.items():
            self._add(Needle("canary", name, token))
        for name, text in answers.items():
            if len(text.strip()) < LEAST_EXACT:
                continue
            self._add(Needle("answer", name, text.strip()))
            words = _words(text)
            if len(words) >= LEAST_WORDS:
                self._shingles[name] = frozenset(_shingles(words))
        forms = sorted(self._forms, key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, forms)), re.IGNORECASE) if forms else None
        self._any = frozenset[tuple[str, ...]]().union(*self._shingles.values())

    @property
    def longest(self) -> int:
        """Bytes by which pieces of a long text must overlap."""
        return max(map(len, self._forms), default=0)

    def _add(self, needle: Needle) -> None:
        raw = needle.text.encode("utf-8", "surrogateescape")
        forms = [(raw, "exact"), (raw.hex().encode(), "hex"), (raw[::-1], "reversed")]
        for shift in range(3):
            # the characters at both ends depend on what is around it
            encoded = base64.b64encode(b"\0" * shift + raw).rstrip(b"=")
            core = encoded[(0, 2, 3)[shift] : len(encoded) - (1 if (len(raw) + shift) % 3 else 0)]
            forms.append((core, "base64"))
        for form, how in forms:
            if len(form) >= LEAST_EXACT:
                self._forms.setdefault(form.lower(), (needle, how))

    def exact(self, data: bytes) -> Iterator[tuple[Needle, str, int, str]]:
        """Needle, how, offset, excerpt. A needle is told once for each way."""
        if self._pattern is None:
            return
        told = set()
        for found in self._pattern.finditer(data):
            known = self._forms.get(found[0].lower())
            if known is None or known in told:
                continue
            told.add(known)
            around = data[max(0, found.start() - 40) : found.end() + 40]
            yield known[0], known[1], found.start(), shown(around.decode("utf-8", "replace"))

    def similar(self, text: str) -> Iterator[tuple[str, float, int, str]]:
        """Answer, share of it that is there, first line, excerpt."""
        if not self._any:
            return
        hits: dict[tuple[str, ...], int] = {}
        for shingle, line in _placed(text):
            if shingle in self._any:
                hits.setdefault(shingle, line)
        for name, wanted in self._shingles.items():
            lines = [hits[shingle] for shingle in wanted if shingle in hits]
            share = len(lines) / len(wanted)
            if share >= self._similarity:
                first = min(lines)
                yield name, share, first, shown("\n".join(text.splitlines()[first - 1 : first + 2]))

    def look(self, data: bytes, where: str, place: str, at: int = 0) -> list[Finding]:
        """All findings in one text. `at`: the offset of its first byte."""
        def finding(kind: str, name: str, how: str, offset: int, share: float, excerpt: str) -> Finding:
            return Finding(
                kind=kind, name=name, how=how, where=where, place=place, offset=offset, similarity=round(share, 3), excerpt=excerpt
            )

        found = [finding(one.kind, one.name, how, at + offset, 1.0, excerpt) for one, how, offset, excerpt in self.exact(data)]
        exact = {one.name for one in found if one.kind == "answer"}
        if b"\0" not in data[:8192]:
            for name, share, line, excerpt in self.similar(data.decode("utf-8", "replace")):
                if name not in exact:
                    found.append(finding("answer", name, "similar", line, share, excerpt))
        return found


def shown(text: str) -> str:
    """For people: one line, nothing that drives a terminal, not long."""
    line = "".join(c if c.isprintable() else "\ufffd" for c in _SPACE.sub(" ", text.strip()))
    return line if len(line) <= MOST_SHOWN else line[: MOST_SHOWN - 1] + "…"


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]


def _shingles(words: list[str]) -> Iterator[tuple[str, ...]]:
    for i in range(len(words) - WORDS + 1):
        yield tuple(words[i : i + WORDS])


def _placed(text: str) -> Iterator[tuple[tuple[str, ...], int]]:
    """Each sequence of words with the line that it begins on."""
    recent: list[tuple[str, int]] = []
    for number, line in enumerate(text.splitlines(), 1):
        for word in _WORD.findall(line):
            recent.append((word.lower(), number))
            if len(recent) > WORDS:
                del recent[0]
            if len(recent) == WORDS:
                yield tuple(word for word, _ in recent), recent[0][1]

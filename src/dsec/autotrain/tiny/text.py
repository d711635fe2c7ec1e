"""The alphabet of compact lines."""

from __future__ import annotations

PAD = "\0"
ALPHABET = PAD + "0123456789" + "abcdefghijklmnopqrstuvwxyz" + "RSD" + "()+-*<?:.|>[];!^$"
CODES = {letter: code for code, letter in enumerate(ALPHABET)}
CALL, CALLED, END = CODES["["], CODES["]"], CODES["$"]


def encode(text: str) -> list[int]:
    """Codes of a compact line. KeyError for a letter that is none of the alphabet's."""
    return [CODES[letter] for letter in text]


def decode(codes: list[int]) -> str:
    """The text of codes; padding is left out."""
    return "".join(ALPHABET[code] for code in codes if code)

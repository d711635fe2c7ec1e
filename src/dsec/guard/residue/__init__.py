"""Residue: canaries and answers in what a sandbox wrote. docs/misbehaviour.md.

    needles    what is looked for in bytes: tokens and texts, as they are, encoded, and by similarity
    watch      reads of canary files, as they happen
    walk       a process of its own that looks through a tree or a layer
"""

"""Breaking functions: small edits of the kinds that people make, found on the syntax tree and applied to the text, so that layout stays.

Kinds: comparison (swapped or loosened), operator, junction (and/or), negation (dropped), constant (off by one, flipped), early_return.
"""
from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
}


@dataclass(frozen=True)
class Mutation:
    """One edit: `text[start:end]` (characters), which is `before`, becomes `after`."""

    path: str
    function: str  # qualified name
    line: int
    kind: str
    start: int
    end: int
    before: str
    after: str

    def apply(self, text: str) -> str:
        """The broken text. Raises ValueError when `text` is not the one that this edit was made for."""
        if text[self.start : self.end] != self.before:
            raise ValueError(f"{self.path}: the text at {self.start} is not {self.before!r}")
        return text[: self.start] + self.after + text[self.end :]

    def describe(self) -> str:
        """One line for people."""
        return f"{self.path}:{self.line} {self.function}: {self.kind}: {_short(self.before)} -> {_short(self.after)}"


def mutations(path: str, text: str) -> list[Mutation]:
    """All edits of the functions in `text`, in source order. Raises SyntaxError."""
    offsets = Offsets(text)
    found: list[Mutation] = []
    for name, function in _functions(ast.parse(text), ""):
        for node in _body(function):
            for kind, after in _variants(node):
                start, end = offsets.span(node)
                mutation = Mutation(path, name, node.lineno, kind, start, end, text[start:end], after)
                if after != mutation.before and _parses(mutation.apply(text)):
                    found.append(mutation)
    return sorted(found, key=lambda m: (m.start, m.end, m.kind))


def _variants(node: ast.expr | ast.stmt) -> Iterator[tuple[str, str]]:
    match node:
        case ast.Compare(left, [op], comparators):
            yield "comparison", ast.unparse(ast.Compare(left, [_COMPARISONS[type(op)]()], comparators))
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS and not (isinstance(op, ast.Mod) and _is_text(left)):
            yield "operator", ast.unparse(ast.BinOp(left, _OPERATORS[type(op)](), right))
        case ast.BoolOp(op, values):
            yield "junction", ast.unparse(ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values))
        case ast.UnaryOp(ast.Not(), operand):
            yield "negation", f"bool({ast.unparse(operand)})"
        case ast.Constant(bool() as value):
            yield "constant", repr(not value)
        case ast.Constant(int() as value):
            yield "constant", repr(value + 1)
        case ast.Return(ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield "early_return", "return None"
        case _:
            return


def _functions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, prefix + node.name + ".")
        elif isinstance(node, ast.If | ast.Try):
            yield from _functions(node, prefix)


def _body(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.expr | ast.stmt]:
    stack: list[ast.AST] = [*function.body]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.JoinedStr):
            continue  # what stands inside an f-string has no reliable position before Python 3.12
        stack.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.expr | ast.stmt) and not _has_fstring(node):
            yield node


def _has_fstring(node: ast.AST) -> bool:
    return any(isinstance(n, ast.JoinedStr) for n in ast.walk(node))


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:57] + "..."


class Offsets:
    """Character offsets of nodes: the syntax tree counts columns in UTF-8 bytes."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _at(self, line: int, column: int) -> int:
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

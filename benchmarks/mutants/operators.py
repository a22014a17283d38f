"""Mutations of one module: small edits of its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
# A changed log text is not a fault.
SKIPPED_CALLS = {"debug", "info", "warning", "error", "exception", "log"}


@dataclass(frozen=True)
class Mutant:
    """One edit, which replaces the text between two offsets of a source."""

    line: int
    start: int
    end: int
    old: str
    text: str
    kind: str

    def apply(self, source: bytes) -> bytes:
        """Return the edited source."""
        return source[: self.start] + self.text.encode() + source[self.end :]

    def __str__(self) -> str:
        changed = self.text if self.old.count("\n") < 4 else "..."
        return f"{self.line}: {self.kind}: {self.old} -> {changed}"


def mutants_of(source: bytes) -> list[Mutant]:
    """Return every mutant of a module's source, ordered by offset."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    mutants = []
    for node, changed, kind in _edits(ast.parse(source)):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        text = changed if isinstance(changed, str) else ast.unparse(changed)
        if isinstance(node, ast.expr):
            text = f"({text})"
        mutants.append(Mutant(node.lineno, start, end, source[start:end].decode(), text, kind))
    return sorted(mutants, key=lambda mutant: (mutant.start, mutant.kind))


Node = ast.expr | ast.stmt
Edit = tuple[Node, ast.AST | str, str]


def _edits(tree: ast.Module) -> Iterator[Edit]:
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.expr | ast.stmt):
            yield from _edits_of(node)
        pending.extend(_children(node))


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield executed nodes: no annotation, decorator, f-string (no offsets in 3.11) or log call."""
    if isinstance(node, ast.JoinedStr) or _is_log_or_repr(node):
        return
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    skipped: list[ast.AST] = []
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            skipped = [*node.decorator_list, *filter(None, [node.returns])]
        case ast.ClassDef():
            skipped = [*node.decorator_list]
        case ast.arg():
            skipped = [*filter(None, [node.annotation])]
        case ast.AnnAssign():
            skipped = [node.annotation]
    yield from (child for child in ast.iter_child_nodes(node) if child not in skipped)


def _is_log_or_repr(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))):
            return name in SKIPPED_CALLS
        case ast.FunctionDef(name="__repr__"):
            return True
    return False


def _edits_of(node: Node) -> Iterator[Edit]:
    match node:
        case ast.Compare(left=left, ops=[op], comparators=rest) if type(op) in COMPARISONS:
            yield node, ast.Compare(left, [COMPARISONS[type(op)]()], rest), "comparison"
        case ast.BoolOp(op=op, values=values):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield node, ast.BoolOp(other, values), "and/or"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
            yield node, ast.BinOp(left, ARITHMETIC[type(op)](), right), "arithmetic"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, operand, "not removed"
        case ast.Constant(value=bool(value)):
            yield node, ast.Constant(not value), "truth value"
        case ast.Constant(value=int(value) | float(value)):
            yield node, ast.Constant(value + 1), "number"
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield node, ast.IfExp(test, orelse, body), "branches exchanged"
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            pass  # changes no behaviour
        case ast.If(test=test) | ast.While(test=test) if not isinstance(test, ast.Constant):
            yield test, ast.UnaryOp(ast.Not(), test), "condition negated"
        case ast.Call(func=ast.Name(id=name)) if name in CALLS:
            yield node.func, CALLS[name], "other function"
        case ast.Expr(value=ast.Call() | ast.Await()) if not _is_log_or_repr(node):
            yield node, "pass", "statement removed"
        case ast.AugAssign(target=target, op=op, value=value) if type(op) in ARITHMETIC:
            yield node, ast.AugAssign(target, ARITHMETIC[type(op)](), value), "arithmetic"
        case ast.Break():
            yield node, "continue", "loop exit"
        case ast.Continue():
            yield node, "break", "loop exit"

"""The possible faults of a Python file, from its syntax tree: each is one that a person could write."""

from __future__ import annotations

import ast

from .fault import Fault

_COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_ARITHMETIC = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "//"), ast.FloorDiv: ("//", "*")}
# Calls whose loss only costs words or time.
_SILENT = ("warn", "warning", "info", "debug")


def faults_of(file: str, source: str) -> list[Fault]:
    """All faults of a file."""
    visitor = _Visitor(file, source)
    visitor.visit(ast.parse(source))
    return visitor.faults


class _Visitor(ast.NodeVisitor):
    def __init__(self, file: str, source: str) -> None:
        self.file, self.source, self.faults = file, source, []
        self._begins = [0]
        for line in source.splitlines(keepends=True):
            self._begins.append(self._begins[-1] + len(line))
        self._lines = source.splitlines()

    def _at(self, line: int, column: int) -> int:
        """Position of what ast counts in bytes of UTF-8."""
        return self._begins[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def _span(self, node: ast.AST) -> tuple[int, int]:
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _text(self, node: ast.AST) -> str:
        begin, end = self._span(node)
        return self.source[begin:end]

    def _add(self, kind: str, node: ast.AST, text: str, begin: int | None = None, end: int | None = None) -> None:
        whole = self._span(node)
        begin, end = whole[0] if begin is None else begin, whole[1] if end is None else end
        line = self.source.count("\n", 0, begin) + 1
        self.faults.append(Fault(self.file, line, kind, begin, end, text))

    def _operator(self, kind: str, left: ast.AST, right: ast.AST, old: str, new: str) -> None:
        """Replace the operator between two operands."""
        begin, end = self._span(left)[1], self._span(right)[0]
        place = self.source.find(old, begin, end)
        if place >= 0:
            self._add(kind, left, new, place, place + len(old))

    def _condition(self, node: ast.If | ast.While | ast.IfExp) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self._add("condition negated", node.test, f"(not ({self._text(node.test)}))")
        self.generic_visit(node)

    visit_If = visit_While = visit_IfExp = _condition

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._add("condition negated", test, f"(not ({self._text(test)}))")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        left = node.left
        for operator, right in zip(node.ops, node.comparators):
            self._operator("comparison changed", left, right, *_COMPARISONS[type(operator)])
            left = right
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:]):
            self._operator("and, or exchanged", left, right, old, new)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in _ARITHMETIC and not _has_text(node):
            self._operator("arithmetic changed", node.left, node.right, *_ARITHMETIC[type(node.op)])
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add("constant changed", node, str(not node.value))
        elif isinstance(node.value, int):
            self._add("constant changed", node, str(node.value + 1))

    def visit_Call(self, node: ast.Call) -> None:
        plain = [one for one in node.args if not isinstance(one, ast.Starred)]
        if len(plain) == len(node.args) >= 2 and self._text(plain[0]) != self._text(plain[1]):
            between = self.source[self._span(plain[0])[1] : self._span(plain[1])[0]]
            text = f"{self._text(plain[1])}{between}{self._text(plain[0])}"
            self._add("arguments swapped", node, text, self._span(plain[0])[0], self._span(plain[1])[1])
        self.generic_visit(node)

    def _removable(self, node: ast.stmt) -> None:
        self._add("statement removed", node, "pass")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):  # a docstring
            return
        called = node.value.func if isinstance(node.value, ast.Call) else None
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if name not in _SILENT:
            self._removable(node)

    visit_AugAssign = visit_Raise = visit_Delete = _removable

    def visit_Assign(self, node: ast.Assign) -> None:
        # A name that is not set is a NameError, which any test notices.
        if all(isinstance(one, (ast.Attribute, ast.Subscript)) for one in node.targets):
            self._removable(node)
        else:
            self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for one in [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.decorator_list, *node.body]:
            self.visit(one)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Words of messages are not code."""


def _has_text(node: ast.BinOp) -> bool:
    words = (one.value for one in ast.walk(node) if isinstance(one, ast.Constant))
    return any(isinstance(one, str) for one in words) or any(isinstance(one, ast.JoinedStr) for one in ast.walk(node))

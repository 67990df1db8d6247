"""Every small mistake that the tool knows, as a change of one node of a file's syntax tree.

| operator | mistake |
|---|---|
| comparison | `<` becomes `<=` or `>=`, `==` becomes `!=`, `in` becomes `not in`, and the other way round |
| condition | `and` becomes `or`, `not` goes, the test of an `if` is negated |
| arithmetic | `+` becomes `-`, `*` becomes `//`, `&` becomes `|`, a minus goes, and the like |
| constant | a number is one more or one less, a truth value its opposite |
| dropped | a statement becomes `pass`: a call, an update, a `raise`, a `continue`, an early `return` |
| swapped | two neighbouring arguments change places |
| order | the other end of a queue, `min` for `max`, `any` for `all`, nothing reversed or sorted |

Not drawn: docstrings, annotations, imports, `__all__`, decorators, asserts, `zip(strict=)`, texts, what an error or a
warning says, and what `__repr__` returns.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
OPPOSITES = {"min": "max", "max": "min", "any": "all", "all": "any", "reversed": "iter", "sorted": "list"}
NEVER_SWAPPED = {
    "cast", "getattr", "hasattr", "isinstance", "issubclass", "setattr",
    "equal", "max", "maximum", "min", "minimum", "same_bits", "same_shape", "same_size",
}  # fmt: skip
"""Calls whose arguments are not swapped: the first call raises, or the result is the same in any order."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        path: of the file, from the root of the repository.
        lines: first and last line of the statement, without the body of a compound one.
        function: name and first line, decorators included, of the outermost function around it; `None` outside of any.
        start, end: the bytes that `after` replaces.
    """

    path: str
    lines: tuple[int, int]
    function: tuple[str, int] | None
    operator: str
    before: str
    after: str
    start: int
    end: int

    def apply(self, source: bytes) -> bytes:
        """Return the file with the change."""
        return source[: self.start] + self.after.encode() + source[self.end :]

    def __str__(self) -> str:
        before, after = (" ".join(text.split()) for text in (self.before, self.after))
        return f"{self.path}:{self.lines[0]} {self.operator}: {before:.70} -> {after:.70}"


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """Return every change of a file."""
    begins = [0]
    for line in source.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    found: dict[tuple[int, int, str], Mutant] = {}
    for node, statement, function in _nodes(ast.parse(source)):
        start = begins[node.lineno - 1] + node.col_offset
        end = begins[node.end_lineno - 1] + node.end_col_offset
        for operator, after in _changes(node, statement):
            before = source[start:end].decode()
            mutant = Mutant(path, _lines(statement), function, operator, before, after, start, end)
            found.setdefault((start, end, after), mutant)
    return list(found.values())


def _nodes(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, ast.stmt, tuple[str, int] | None]]:
    """Yield each node that may change, with its statement and the outermost function around it."""

    def walk(
        node: ast.AST, statement: ast.stmt | None, function: tuple[str, int] | None
    ) -> Iterator[tuple[ast.expr | ast.stmt, ast.stmt, tuple[str, int] | None]]:
        inner = function
        if isinstance(node, ast.stmt):
            statement = node
            if isinstance(node, Function) and function is None:
                inner = node.name, min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        if isinstance(node, ast.expr | ast.stmt) and statement is not None:
            yield node, statement, function
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not _left_out(node, name, child):
                    # Defaults of arguments are computed where the function is defined.
                    yield from walk(child, statement, inner if name == "body" else function)

    yield from walk(tree, None, None)


def _left_out(parent: ast.AST, field: str, node: ast.AST) -> bool:
    if field in ("annotation", "returns", "decorator_list", "bases", "type_params"):
        return True
    if isinstance(node, ast.Import | ast.ImportFrom | ast.Assert | ast.JoinedStr | ast.Global | ast.Nonlocal):
        return True
    if isinstance(parent, ast.Raise) or (isinstance(parent, ast.Call) and getattr(node, "arg", "") == "strict"):
        return True
    if isinstance(node, Function) and node.name in ("__repr__", "__str__"):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
        return True
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        return True
    return isinstance(node, ast.Expr) and ast.unparse(node.value).startswith(("warnings.warn(", "warn(", "logger."))


def _lines(statement: ast.stmt) -> tuple[int, int]:
    """Return the lines that run when a statement does; of a compound one those of its head."""
    if body := getattr(statement, "body", None) or getattr(statement, "cases", None):
        first = getattr(body[0], "lineno", None) or body[0].pattern.lineno
        return statement.lineno, max(statement.lineno, first - 1)
    return statement.lineno, statement.end_lineno or statement.lineno


def _changes(node: ast.expr | ast.stmt, statement: ast.stmt) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.stmt):
        if _droppable(node):
            yield "dropped", "pass"
        return
    for operator, new in _new_expressions(node):
        yield operator, f"({ast.unparse(new)})"
    if isinstance(statement, ast.If | ast.While) and statement.test is node and not isinstance(node, ast.Compare):
        yield "condition", f"(not ({ast.unparse(node)}))"


def _droppable(node: ast.stmt) -> bool:
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    if isinstance(node, ast.Return):
        # At the end of a function it would only leave a result out.
        return node.col_offset > 8
    return isinstance(node, ast.AugAssign | ast.Raise | ast.Continue | ast.Break | ast.Delete) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    )


def _new_expressions(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    new = copy.deepcopy(node)
    if isinstance(new, ast.Compare):
        for place, was in enumerate(new.ops):
            for other in COMPARISONS[type(was)]:
                new.ops[place] = other()
                yield "comparison", new
            new.ops[place] = was
    elif isinstance(new, ast.BoolOp):
        new.op = ast.And() if isinstance(new.op, ast.Or) else ast.Or()
        yield "condition", new
    elif isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.Not | ast.USub):
        yield "condition" if isinstance(new.op, ast.Not) else "arithmetic", new.operand
    elif isinstance(new, ast.BinOp) and type(new.op) in ARITHMETIC:
        if not any(_is_text(side) for side in (new.left, new.right)):
            new.op = ARITHMETIC[type(new.op)]()
            yield "arithmetic", new
    elif isinstance(new, ast.Constant):
        if isinstance(new.value, bool):
            yield "constant", ast.Constant(not new.value)
        elif isinstance(new.value, int | float):
            for number in (new.value + 1, new.value - 1):
                if number != new.value:  # as of a very large one
                    yield "constant", ast.Constant(number)
    elif isinstance(new, ast.Call):
        yield from _new_calls(new)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _new_calls(call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    plain = not any(isinstance(argument, ast.Starred) for argument in call.args)
    if plain and name not in NEVER_SWAPPED:
        for place, (first, second) in enumerate(zip(call.args, call.args[1:], strict=False)):
            if not _is_text(first) and not _is_text(second) and ast.unparse(first) != ast.unparse(second):
                arguments = [*call.args]
                arguments[place : place + 2] = second, first
                yield "swapped", ast.Call(call.func, arguments, call.keywords)
    if isinstance(call.func, ast.Name) and name in OPPOSITES:
        keywords = call.keywords if name in ("min", "max") else []
        yield "order", ast.Call(ast.Name(OPPOSITES[name]), call.args, keywords)
    elif isinstance(call.func, ast.Attribute):
        owner = call.func.value
        if name == "append" and plain and not _is_text(call.args[0]):
            yield "order", ast.Call(ast.Attribute(owner, "insert"), [ast.Constant(0), *call.args], [])
        elif name in ("appendleft", "popleft"):
            yield "order", ast.Call(ast.Attribute(owner, name.removesuffix("left")), call.args, [])
        elif name == "pop" and not call.args:
            yield "order", ast.Call(call.func, [ast.Constant(0)], [])
        elif name == "popitem":
            yield "order", ast.Call(call.func, [], [] if call.keywords else [ast.keyword("last", ast.Constant(False))])

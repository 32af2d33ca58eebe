"""How a module's class uses a weight, read from the class's source: as x Wᵀ, as x W, or as a table of rows.

Codes are stored with one row per output, (outputs, inputs). transformers has linears under several classes and with
either orientation: Conv1D in GPT-2, stacks of experts in GPT-OSS, Llama 4 and JetMoe. Their classes are not listed;
`weight_use` finds the product with `self.<name>` in the class's code. A weight whose use is not found stays dense.
"""

from __future__ import annotations

import ast
import enum
import functools
import inspect
import textwrap

from torch import nn

_PRODUCTS = {"matmul": 2, "mm": 2, "bmm": 2, "addmm": 3, "baddbmm": 3}
"""Functions of torch for products, and the number of their arguments; the last two are the factors."""
_TRANSPOSING = ("T", "mT", "t", "transpose")
_UNCHANGED = ("to", "float", "type_as", "contiguous", "detach", "data")
"""Attributes and methods of a weight that change nothing but dtype or memory."""


class Use(enum.Enum):
    """ROWS: x Wᵀ, one row per output. COLUMNS: x W, one column per output. TABLE: rows are looked up."""

    ROWS = "rows"
    COLUMNS = "columns"
    TABLE = "table"


@functools.cache
def weight_use(kind: type[nn.Module], name: str) -> Use | None:
    """How modules of this class use their parameter `name`; None if no use is found or the uses differ."""
    uses = set()
    for cls in kind.__mro__:
        if cls is nn.Module:
            break
        for node in ast.walk(_parsed(cls)):
            uses |= _uses_in(node, name)
    return uses.pop() if len(uses) == 1 else None


@functools.cache
def _parsed(cls: type) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):  # a class made at run time has no source
        return ast.Module([], [])


def _uses_in(node: ast.AST, name: str) -> set[Use]:
    """The uses of `self.<name>` as a factor of the product that this node is, if it is one."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return _factors(node.left, node.right, name)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return set()
    function, arguments = node.func.attr, node.args
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    if function == "linear":
        weight = arguments[1] if len(arguments) > 1 else keywords.get("weight")
        return _factors(None, weight, name, transposed=True)
    if function == "embedding":
        weight = arguments[1] if len(arguments) > 1 else keywords.get("weight")
        return {Use.TABLE} if _orientation(weight, name) is False else set()
    if function in _PRODUCTS:
        is_method = not (isinstance(node.func.value, ast.Name) and node.func.value.id == "torch")
        operands = [node.func.value, *arguments] if is_method else arguments
        if len(operands) >= _PRODUCTS[function]:
            return _factors(*operands[_PRODUCTS[function] - 2 : _PRODUCTS[function]], name)
    return set()


def _factors(left: ast.AST | None, right: ast.AST | None, name: str, *, transposed: bool = False) -> set[Use]:
    """The uses of the weight in left @ right; transposed: in left @ rightᵀ."""
    uses = set()
    as_right, as_left = _orientation(right, name), _orientation(left, name)
    if as_right is not None:
        uses.add(Use.ROWS if as_right != transposed else Use.COLUMNS)
    if as_left is not None:
        uses.add(Use.COLUMNS if as_left else Use.ROWS)
    return uses


def _orientation(node: ast.AST | None, name: str) -> bool | None:
    """Whether the expression is the transposed weight (True) or the weight (False); None if it is something else."""
    flipped = False
    while node is not None:
        if isinstance(node, ast.Subscript):
            if isinstance(node.slice, ast.Slice | ast.Tuple):
                return None
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr not in (*_TRANSPOSING, *_UNCHANGED):
                return None
            node = node.func
        elif isinstance(node, ast.Attribute):
            if node.attr == name and isinstance(node.value, ast.Name) and node.value.id == "self":
                return flipped
            if node.attr in _TRANSPOSING:
                flipped = not flipped
            elif node.attr not in _UNCHANGED:
                return None
            node = node.value
        else:
            return None
    return None

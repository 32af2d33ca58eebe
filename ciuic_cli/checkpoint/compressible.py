"""Which weights of transformers modules can be compressed, and how the modules use them.

Linears, embeddings, and experts in the usual layout are replaced by compressed modules: `matrix_fault` and
`experts_fault` take a module and return the reason why not, or None. Any other module keeps its class, and its code
reads a view of the codes. Codes have one row per output, (outputs, inputs), and transformers has weights of either
orientation: Conv1D in GPT-2, stacks of experts in GPT-OSS, Llama 4 and JetMoe. Their classes are not listed;
`weight_use` finds the product with `self.<name>` in the class's source. A weight whose use is not found stays dense.

`roles` (what to compress) and `runtime.swap` (what replaces a module on loading) both ask here, so that they agree.
"""

from __future__ import annotations

import ast
import enum
import functools
import inspect
import textwrap

from torch import nn

EXPERT_STACKS = ("gate_up_proj", "down_proj")
"""The parameters of an experts module that are stored as stacks of blobs."""

_LAYOUT_FLAGS = {"has_gate": True, "has_bias": False, "is_concatenated": True}
"""Attributes of transformers' experts modules that describe the weight layout, with the supported values."""
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


def experts_fault(module: nn.Module) -> str | None:
    """Why this experts module cannot hold packed stacks, or None if it can."""
    if not all(name in module._parameters for name in EXPERT_STACKS):
        return f"it has no parameters {' and '.join(EXPERT_STACKS)}"
    up, down = (module.get_parameter(name).shape for name in EXPERT_STACKS)
    rows_are_outputs = up[2] == down[1] and up[1] in (down[2], 2 * down[2])
    if getattr(module, "is_transposed", False) or not rows_are_outputs:
        return "its experts are stored as (inputs, outputs)"
    if not hasattr(module, "_apply_gate"):
        return "it does not follow transformers' experts interface"
    for flag, expected in _LAYOUT_FLAGS.items():
        if getattr(module, flag, expected) != expected:
            return f"its weights are laid out differently ({flag}={not expected})"
    if getattr(module, "has_post_expert_norm", False):
        return "it normalises each expert's output"
    return None


def matrix_fault(module: nn.Module) -> str | None:
    """Why this module cannot hold a packed matrix as its weight, or None if it can."""
    if isinstance(module, nn.Embedding):
        is_plain = type(module).forward is nn.Embedding.forward or embedding_scale_of(module) is not None
        return None if is_plain else "its class computes something else from the table"
    if isinstance(module, nn.Linear):
        is_plain = type(module).forward is nn.Linear.forward or is_grouped_linear(module)
        return None if is_plain else "its class computes something else than x W^T"
    return "it is neither a linear nor an embedding"


def embedding_scale_of(embedding: nn.Embedding) -> float | None:
    """The factor by which the module multiplies its rows, or None. Gemma keeps it as a Python number."""
    value = getattr(embedding, "scalar_embed_scale", None)
    return float(value) if isinstance(value, (int, float)) else None


def is_grouped_linear(linear: nn.Linear) -> bool:
    """Whether the linear is block diagonal, as DeepSeek-V4's `o_a_proj` is."""
    return type(linear).__name__.endswith("GroupedLinear") and linear.bias is None


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
            return _factors(operands[_PRODUCTS[function] - 2], operands[_PRODUCTS[function] - 1], name)
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
    """True if the expression is the transposed weight, False if it is the weight, None if it is something else."""
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

"""Which weights of transformers modules can be compressed, and how the modules use them.

Linears, embeddings, and experts in the usual layout are replaced by compressed modules: `matrix_fault` and
`experts_fault` take a module and return the reason why not, or None. Any other module keeps its class, and its code
reads a view of the codes. Codes have one row per output, (outputs, inputs), and transformers has weights of either
orientation: Conv1D in GPT-2, stacks of experts in GPT-OSS, Llama 4 and JetMoe. Their classes are not listed;
`weight_use` finds the product with `self.<name>` in the class's source. A weight whose use is not found stays dense.
DBRX has the experts of a layer one after another in a flat matrix; `stack_flat_experts` makes a stack of it.

`roles` (what to compress) and `runtime.swap` (what replaces a module on loading) both ask here, so that they agree.
"""

from __future__ import annotations

import ast
import enum
import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from ciuic_cli.source_code import syntax_tree

EXPERT_STACKS = ("gate_up_proj", "down_proj")
"""The parameters of an experts module that are stored as stacks of blobs."""

_LAYOUT_FLAGS = {"has_gate": True, "has_bias": False, "is_concatenated": True}
"""Attributes of transformers' experts modules that describe the weight layout, with the supported values."""
_FLAT = "ciuic_flat_experts"
"""Attribute of modules with parameters that `stack_flat_experts` made stacks of."""
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


def parameter_use(module: nn.Module, name: str) -> Use | None:
    """How the module, or its parent for flat experts, uses its parameter `name`; None as `weight_use`."""
    flat = flat_experts(module)
    return flat[name] if name in flat else weight_use(type(module), name)


def weight_use(kind: type[nn.Module], name: str) -> Use | None:
    """How modules of this class use their parameter `name`; None if no use is found or the uses differ."""
    return _use_in_class(kind, f"self.{name}")


def _use_in_class(kind: type, weight: str) -> Use | None:
    """How the code of this class uses `weight`: "self.<name>", or the name of a variable."""
    uses = {
        use for cls in _classes(kind) for node in ast.walk(syntax_tree(cls)) for use in _uses_in(node, weight)
    }
    return uses.pop() if len(uses) == 1 else None


def _classes(kind: type) -> Iterator[type]:
    """The class and those that it inherits from, up to nn.Module."""
    for cls in kind.__mro__:
        if cls is nn.Module:
            return
        yield cls


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
            if f"self.{node.attr}" == name and isinstance(node.value, ast.Name) and node.value.id == "self":
                return flipped
            if node.attr in _TRANSPOSING:
                flipped = not flipped
            elif node.attr not in _UNCHANGED:
                return None
            node = node.value
        else:
            return flipped if isinstance(node, ast.Name) and node.id == name else None
    return None


@dataclass(frozen=True)
class _FlatUse:
    """A parent's code `x = self.<child>.<name>.view(shape)[...]`, and its call of the child with x.

    shape: one node per size. position: of x among the arguments of the call.
    """

    child: str
    name: str
    shape: tuple[ast.expr, ...]
    position: int


def stack_flat_experts(model: nn.Module) -> None:
    """Give every flat matrix of experts three dimensions, in place: (E f, h) becomes (E, f, h).

    A matrix is flat if its module's parent takes single experts out of a view of it with three dimensions and passes
    them to the module. The parent's code does the same with the stack, of which that view is the stack itself.
    """
    for parent in model.modules():
        for name, child in parent.named_children():
            if any(
                short != "weight" and tensor.dim() == 2
                for short, tensor in child.named_parameters(recurse=False)
            ):
                _stack_experts_of(parent, name, child)


def flat_experts(module: nn.Module) -> dict[str, Use]:
    """The parameters of the module that `stack_flat_experts` made stacks of, and how they are used."""
    found: dict[str, Use] = vars(module).get(_FLAT, {})
    return found


def file_shape(model: nn.Module, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in checkpoints of a parameter that has `shape` in the model: flat experts have two dimensions there.

    A name that the model does not have keeps its shape.
    """
    owner, _, short = name.rpartition(".")
    try:
        is_flat = len(shape) == 3 and short in flat_experts(model.get_submodule(owner))
    except AttributeError:
        return shape
    return (shape[0] * shape[1], shape[2]) if is_flat else shape


def _stack_experts_of(parent: nn.Module, name: str, child: nn.Module) -> None:
    inputs = [*inspect.signature(type(child).forward).parameters][1:]
    kind: type = type(parent)
    for flat in _flat_uses(kind):
        matrix = child._parameters.get(flat.name) if flat.child == name else None
        sizes = [size for node in flat.shape if (size := _size(node, parent)) is not None]
        if matrix is None or matrix.dim() != 2 or len(sizes) != 3 or flat.position >= len(inputs):
            continue
        use = _use_in_class(type(child), inputs[flat.position])
        stack = matrix.data.view(sizes)
        if use is not None and stack.shape[2] == matrix.shape[1]:
            child._parameters[flat.name] = nn.Parameter(stack, requires_grad=matrix.requires_grad)
            vars(child).setdefault(_FLAT, {})[flat.name] = use


@functools.cache
def _flat_uses(kind: type) -> tuple[_FlatUse, ...]:
    found = []
    for cls in _classes(kind):
        for function in (node for node in ast.walk(syntax_tree(cls)) if isinstance(node, ast.FunctionDef)):
            assigned = {
                node.targets[0].id: node.value
                for node in ast.walk(function)
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
            }
            for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
                for position, argument in enumerate(call.args):
                    value = assigned.get(argument.id) if isinstance(argument, ast.Name) else argument
                    match value, call.func:
                        case (
                            ast.Subscript(
                                ast.Call(
                                    ast.Attribute(
                                        ast.Attribute(ast.Attribute(ast.Name("self"), child), name), "view"
                                    ),
                                    shape,
                                )
                            ),
                            ast.Attribute(ast.Name("self"), called),
                        ) if called == child:
                            found.append(_FlatUse(child, name, _sizes(shape, assigned), position))
    return tuple(found)


def _sizes(shape: list[ast.expr], assigned: dict[str, ast.expr]) -> tuple[ast.expr, ...]:
    """The nodes of the sizes that are passed to `view`, one by one or as a tuple."""
    first = shape[0] if len(shape) == 1 else None
    if isinstance(first, ast.Name):
        first = assigned.get(first.id, first)
    return tuple(first.elts) if isinstance(first, ast.Tuple | ast.List) else tuple(shape)


def _size(node: ast.expr, module: nn.Module) -> int | None:
    """The value of a number, or of an attribute of the module; None for anything else."""
    match node:
        case ast.Constant(int(value)):
            return value
        case ast.UnaryOp(ast.USub(), ast.Constant(int(value))):
            return -value
        case ast.Attribute(ast.Name("self"), name):
            found = getattr(module, name, None)
            return found if isinstance(found, int) else None
    return None

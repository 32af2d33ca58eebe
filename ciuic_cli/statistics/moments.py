"""Second moments of every matrix's inputs and output gradients, recorded while a layer runs.

For a matrix W (m outputs, n inputs) with input x_t and gradient g_t = d loss / d (W x_t) at token t, the Fisher
information of W is the mean over tokens of (g gᵀ) ⊗ (x xᵀ). It is stored as a Kronecker product G ⊗ H,
one step of power iteration from the identity (Tseng et al., "Model-Preserving Adaptive Rounding", 2025):

    H = Σ |g_t|² x_t x_tᵀ / Σ |g_t|² |x_t|²          (n x n, unit trace)
    G = Σ |x_t|² g_t g_tᵀ / N                         (m x m; its trace is the mean of |g|² |x|²)

so that KL per token ≈ ½ tr(Eᵀ G E H). Weighing each side by the other is what keeps attention sinks from
dominating: their activations are huge, but hardly any gradient reaches them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ciuic_cli.statistics.experts import full_moments_fit
from ciuic_cli.threads import one_thread

FULL_FISHER_LIMIT = 16384
"""Outputs above which only the diagonal of G is kept (in practice: the head)."""

MOMENT_BLOCK = 128
"""Columns from which half a symmetric product is worth several smaller products."""

Key = tuple[str, int | None]


@dataclass
class Moments:
    """Running sums of one matrix: input moment (n, n) and output moment (m, m), or of either the diagonal alone."""

    inputs: torch.Tensor
    outputs: torch.Tensor
    energy: float = 0.0
    tokens: int = 0
    dtype: torch.dtype = torch.float32

    @classmethod
    def zeros(
        cls,
        rows: int,
        cols: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        full_inputs: bool = True,
        full_outputs: bool,
    ) -> Moments:
        """dtype: of the products; the sums are float32. Without full_inputs or full_outputs: diagonals."""
        inputs = torch.zeros((cols, cols) if full_inputs else (cols,), device=device)
        outputs = torch.zeros((rows, rows) if full_outputs else (rows,), device=device)
        return cls(inputs, outputs, dtype=dtype)

    def add(self, x: torch.Tensor, g: torch.Tensor) -> None:
        """Add tokens: x (t, n) inputs and g (t, m) gradients, float32."""
        x_norm, g_norm = x.norm(dim=1, keepdim=True), g.norm(dim=1, keepdim=True)
        self._sum(self.inputs, x * g_norm)
        self._sum(self.outputs, g * x_norm)
        with one_thread():
            self.energy += float((x_norm * g_norm).square().sum())
        self.tokens += x.shape[0]

    def include(self, other: Moments) -> None:
        """Add the sums of other tokens."""
        self.inputs += other.inputs
        self.outputs += other.outputs
        self.energy += other.energy
        self.tokens += other.tokens

    def _sum(self, moment: torch.Tensor, vectors: torch.Tensor) -> None:
        """Add the second moment of vectors (t, k), or its diagonal, in place."""
        if moment.dim() == 1:
            moment += vectors.square().sum(0)
        else:
            moment += second_moment(vectors, self.dtype)


def second_moment(vectors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Vᵀ V, (n, n) float32, of vectors V (t, n) float32; on a GPU the factors are rounded to `dtype`.

    The sums are float32 in any case: rounded to bfloat16, a moment with one large direction is not positive definite
    any more. On a CPU, where a product has the dtype of its factors, these are float32 too; half of it is mirrored.
    """
    if vectors.device.type == "cuda" and dtype != torch.float32:
        rounded = vectors.to(dtype)
        return torch.mm(rounded.T, rounded, out_dtype=torch.float32)
    width = vectors.shape[1]
    moment = torch.empty((width, width), device=vectors.device)
    step = max(MOMENT_BLOCK, -(-width // 8))
    for begin in range(0, width, step):
        end = min(begin + step, width)
        torch.mm(vectors[:, begin:end].T, vectors[:, :end], out=moment[begin:end, :end])
        moment[:begin, begin:end] = moment[begin:end, :begin].T
    return moment


@dataclass(frozen=True)
class Watched:
    """One parameter to record: its in-memory name and the tensor that the layer computes with."""

    name: str
    tensor: torch.Tensor


@dataclass
class MomentRecorder(TorchFunctionMode):
    """While active, every `F.linear` or grouped product on a watched weight records x and its output's gradient.

    Expert stacks (E, m, n) are recognised by the slice of the stack that is multiplied with. Where their full
    moments would take too much (`experts.py`), the stack's pool (name, None) is recorded, and each expert's diagonals.
    """

    watched: list[Watched]
    dtype: torch.dtype
    moments: dict[Key, Moments] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self._address: dict[int, Key] = {}
        self._pooled: set[str] = set()
        for item in self.watched:
            weight = item.tensor
            if weight.dim() == 3:
                if not full_moments_fit(*weight.shape):
                    self._pooled.add(item.name)
                for expert in range(weight.shape[0]):
                    self._address[weight[expert].data_ptr()] = (item.name, expert)
            else:
                self._address[weight.data_ptr()] = (item.name, None)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is torch.bmm and output.requires_grad:
            self._watch_groups(args[0], args[1], output)
        if func is not torch.nn.functional.linear:
            return output
        weight = args[1] if len(args) > 1 else (kwargs or {})["weight"]
        key = self._address.get(weight.data_ptr())
        if key is not None and output.requires_grad and weight.dim() == 2:
            x = (args[0] if args else (kwargs or {})["input"]).detach()
            output.register_hook(lambda gradient: self._record(key, weight.shape, x, gradient))
        return output

    def _watch_groups(self, x: torch.Tensor, weight: torch.Tensor, output: torch.Tensor) -> None:
        """A grouped linear (DeepSeek-V4's o_a_proj): x (G, t, n) times a view (G, n, m / G) of the weight (m, n).

        Each group is a matrix product of its own whose outputs are some of the rows: their gradients stand in
        their place among zeros.
        """
        key = self._address.get(weight.data_ptr())
        if key is None:
            return
        groups, cols, share = weight.shape
        inputs = x.detach()

        def record(gradient: torch.Tensor) -> None:
            for group in range(groups):
                rows = torch.zeros(gradient.shape[1], groups * share, device=gradient.device)
                rows[:, group * share : (group + 1) * share] = gradient[group]
                self._record(key, torch.Size((groups * share, cols)), inputs[group], rows)

        output.register_hook(record)

    def _record(self, key: Key, shape: torch.Size, x: torch.Tensor, gradient: torch.Tensor) -> None:
        rows, cols = shape
        name, expert = key
        x, gradient = x.reshape(-1, cols).float(), gradient.reshape(-1, rows).float()
        with torch.autocast(x.device.type, enabled=False):
            if expert is not None and name in self._pooled:
                self._sums(key, shape, x.device, diagonals=True).add(x, gradient)
                key = (name, None)
            self._sums(key, shape, x.device).add(x, gradient)

    def _sums(self, key: Key, shape: torch.Size, device: torch.device, *, diagonals: bool = False) -> Moments:
        if key not in self.moments:
            rows, cols = shape
            self.moments[key] = Moments.zeros(
                rows, cols, device, self.dtype,
                full_inputs=not diagonals, full_outputs=not diagonals and rows <= FULL_FISHER_LIMIT,
            )  # fmt: skip
        return self.moments[key]

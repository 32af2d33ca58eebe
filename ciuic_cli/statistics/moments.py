"""Second moments of every matrix's inputs and output gradients, recorded while a layer runs.

For a matrix W (m outputs, n inputs) with input x_t and gradient g_t = d loss / d (W x_t) at token t, the gradient of W
over a sequence is Σ g_t x_tᵀ, and the Fisher information of W the second moment of that sum. It is stored as a
Kronecker product G ⊗ H, one step of power iteration from the identity (Tseng et al., "Model-Preserving Adaptive
Rounding", 2025):

    H = Σ (g_s · g_t) x_s x_tᵀ / Σ (g_s · g_t) (x_s · x_t)          (n x n, unit trace)
    G = Σ (x_s · x_t) g_s g_tᵀ / N                                   (m x m)

over all pairs s, t of tokens of a sequence (N tokens in all; pairs s ≠ t count with `MEETING`), so that KL per token
≈ ½ tr(Eᵀ G E H). Taking tokens for independent would leave the pairs with s = t: but the error of W is the same at
every token, and where tokens have inputs in common, what it does at one adds to what it does at the next. Weighing
each side by the other is what keeps attention sinks from dominating: their activations are huge, but hardly any
gradient reaches them.

A few tokens still have most of the loss, and in other text it is others: feedback that is made for those is no use
elsewhere. So every g_t is divided by the square root of |x_t| |g_t|, with which its loss counts with its root, and
G is multiplied by what makes the sum of all losses what it was (docs/experiments/statistics/heavy-tails.md).

For few outputs or inputs the sums over pairs are had more cheaply from the gradients of W themselves.

An expert's tokens are few and far between; they are taken for independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ciuic_cli.layerwise.linear_hooks import Hook, Key, LinearHook, Product, WatchedLinear
from ciuic_cli.process.memory import limit_freed_memory
from ciuic_cli.process.threads import one_thread
from ciuic_cli.statistics.experts import full_moments_fit

FULL_FISHER_LIMIT = 16384
"""Outputs above which only the diagonal of G is kept (in practice: the head)."""

MEETING = 0.25
"""Weight of what two tokens of a sequence have in common, as against what each costs by itself: 1 would be unbiased,
but is noisy from few sequences. Measured: docs/experiments/statistics/token-pairs.md."""
MEETING_TOKENS = 1024
"""Tokens of a sequence that are looked at together: the work over pairs grows with their number."""
MOMENT_BLOCK = 128
"""Columns from which half a symmetric product is worth several smaller products."""


@dataclass
class Moments:
    """Running sums of one matrix: input moment (n, n) and output moment (m, m), or of either the diagonal alone.

    energy: what both add up to, the trace of the inputs' moment; loss, counted: Σ |x|² |g|² of the tokens as they are,
    and as they count.
    """

    inputs: torch.Tensor
    outputs: torch.Tensor
    energy: float = 0.0
    tokens: int = 0
    loss: float = 0.0
    counted: float = 0.0
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
        """Add tokens whose errors do not meet: x (t, n) inputs and g (t, m) gradients, float32."""
        self._add_alone(x, self._with_shorter_tails(x, g))
        self.tokens += x.shape[0]

    def add_sequences(self, x: torch.Tensor, g: torch.Tensor) -> None:
        """Add the tokens of sequences: x (s, t, n) inputs and g (s, t, m) gradients, float32."""
        g = self._with_shorter_tails(x, g)
        pairs, gradients = meeting_work(x.shape[1], g.shape[2], x.shape[2])
        if pairs < gradients:
            self._add_pairs(x, g)
        else:
            self._add_gradients(x, g)
            self._add_alone(x.flatten(0, 1), g.flatten(0, 1), 1 - MEETING)
        self.tokens += x.shape[0] * x.shape[1]

    @property
    def numbers(self) -> tuple[float, int, float, float]:
        """All but the tensors, in the order of the fields."""
        return self.energy, self.tokens, self.loss, self.counted

    @property
    def scale(self) -> float:
        """Loss of the tokens as they are over that of the tokens as they count."""
        return self.loss / self.counted if self.counted else 1.0

    def _with_shorter_tails(self, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """Gradients (.., m) with which a token's loss is |x| |g| instead of its square; both are added up."""
        root = x.norm(dim=-1, keepdim=True) * g.norm(dim=-1, keepdim=True)
        with one_thread():
            self.loss += float(root.square().sum())
            self.counted += float(root.sum())
        return g * root.clamp_min(1e-30).rsqrt()

    def _add_pairs(self, x: torch.Tensor, g: torch.Tensor) -> None:
        """Products of all tokens of a sequence with each other (s, t, t), and their sums."""
        of_x, of_g = _meeting(symmetric_product(x.mT, x.mT)), symmetric_product(g.mT, g.mT)
        with one_thread():
            self.energy += float((of_x * of_g).sum())
        self._sum(self.outputs, g.flatten(0, 1), (of_x @ g).flatten(0, 1))
        self._sum(self.inputs, x.flatten(0, 1), (_meeting(of_g) @ x).flatten(0, 1))

    def _add_gradients(self, x: torch.Tensor, g: torch.Tensor) -> None:
        """Second moments of the weight's gradient (s, m, n): all pairs of tokens of a sequence, by `MEETING`."""
        gradient = g.mT @ (MEETING**0.5 * x)
        with one_thread():
            self.energy += float(gradient.square().sum())
        self._sum(self.inputs, gradient.flatten(0, 1))
        self._sum(self.outputs, gradient.mT.flatten(0, 1))

    def _add_alone(self, x: torch.Tensor, g: torch.Tensor, share: float = 1.0) -> None:
        """A share of what each token costs by itself: x (t, n) and g (t, m)."""
        x_norm, g_norm = x.norm(dim=1, keepdim=True), g.norm(dim=1, keepdim=True)
        self._sum(self.inputs, x * (share**0.5 * g_norm))
        self._sum(self.outputs, g * (share**0.5 * x_norm))
        with one_thread():
            self.energy += share * float((x_norm * g_norm).square().sum())

    def include(self, other: Moments) -> None:
        """Add the sums of other tokens."""
        self.inputs += other.inputs
        self.outputs += other.outputs
        self.energy += other.energy
        self.tokens += other.tokens
        self.loss += other.loss
        self.counted += other.counted

    def _sum(self, moment: torch.Tensor, left: torch.Tensor, right: torch.Tensor | None = None) -> None:
        """Add leftᵀ right of (t, k), which is symmetric, or its diagonal, in place. right: left itself if not given."""
        right = left if right is None else right
        if moment.dim() == 1:
            moment += (left * right).sum(0)
        else:
            moment += symmetric_product(left, right, self.dtype)


def meeting_work(length: int, rows: int, cols: int) -> tuple[int, int]:
    """Multiplications for what the tokens of one sequence have in common: over pairs of tokens, and by the gradient of
    the weight. Both lead to the same sums, and cost the same for the tokens alone. Symmetric products count whole, and
    both moments as full ones."""
    # Of inputs and gradients each: with itself, and then with what came of the other.
    pairs = 2 * length * length * (rows + cols)
    gradients = length * rows * cols + rows * cols * (rows + cols)
    return pairs, gradients


def _meeting(gram: torch.Tensor) -> torch.Tensor:
    """The products (s, t, t) of tokens with each other, those of different ones weighed by `MEETING`; in place."""
    alone = gram.diagonal(dim1=-2, dim2=-1).clone()
    gram.mul_(MEETING).diagonal(dim1=-2, dim2=-1).copy_(alone)
    return gram


def symmetric_product(
    left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """AᵀB, (..., n, n) float32, of A and B (..., t, n) float32 for which it is symmetric; half of it is mirrored.

    The sums are float32 in any case: rounded to bfloat16, a moment with one large direction is not positive definite
    any more. So would one be of two factors that are rounded by themselves; only AᵀA on a GPU, where a product of
    bfloat16 factors can be float32, has A rounded to `dtype`.
    """
    if left is right and left.device.type == "cuda" and dtype != torch.float32:
        rounded = left.to(dtype)
        return torch.mm(rounded.T, rounded, out_dtype=torch.float32)
    width = left.shape[-1]
    moment = torch.empty((*left.shape[:-2], width, width), device=left.device)
    count = max(1, min(8, width // MOMENT_BLOCK))
    step = -(-width // count)  # alike: of a product with few columns the bits depend on the number of threads
    for begin in range(0, width, step):
        end = min(begin + step, width)
        block = moment[..., begin:end, :end]
        torch.matmul(left[..., begin:end].mT, right[..., :end], out=block)
        moment[..., :begin, begin:end] = block[..., :begin].mT
    return moment


class MomentRecorder(LinearHook):
    """While active, every product with a watched weight adds its inputs and its outputs' gradients to the moments.

    Where full moments of an expert stack would take too much (`experts.py`), the stack's pool (name, None) is
    recorded, and each expert's diagonals.
    """

    def __init__(self, watched: Sequence[WatchedLinear], dtype: torch.dtype, length: int) -> None:
        super().__init__(watched)
        self.dtype, self.length = dtype, length
        self.moments: dict[Key, Moments] = {}
        stacks = [item for item in watched if item.tensor.dim() == 3]
        self._pooled = {item.name for item in stacks if not full_moments_fit(*item.tensor.shape)}

    def watch(self, product: Product) -> Hook:
        key, shape, rows, x = product.key, product.shape, product.rows, product.x
        if rows == slice(0, shape[0]):
            return lambda gradient: self._record(key, shape, x, gradient)

        def among_zeros(gradient: torch.Tensor) -> None:
            whole = torch.zeros(len(gradient), shape[0], device=gradient.device)
            whole[:, rows] = gradient
            self._record(key, shape, x, whole)

        return among_zeros

    def _record(self, key: Key, shape: torch.Size, x: torch.Tensor, gradient: torch.Tensor) -> None:
        limit_freed_memory()
        rows, cols = shape
        name, expert = key
        x, gradient = x.reshape(-1, cols).float(), gradient.reshape(-1, rows).float()
        with torch.autocast(x.device.type, enabled=False):
            if expert is not None and name in self._pooled:
                self._sums(key, shape, x.device, diagonals=True).add(x, gradient)
                self._sums((name, None), shape, x.device).add(x, gradient)
            elif (
                expert is not None or len(x) % self.length
            ):  # some tokens, or pooled ones: of no one sequence
                self._sums(key, shape, x.device).add(x, gradient)
            else:
                sums = self._sums(key, shape, x.device)
                inputs, gradients = (each.unflatten(0, (-1, self.length)) for each in (x, gradient))
                for parts in zip(
                    inputs.split(MEETING_TOKENS, 1), gradients.split(MEETING_TOKENS, 1), strict=True
                ):
                    sums.add_sequences(*parts)

    def _sums(self, key: Key, shape: torch.Size, device: torch.device, *, diagonals: bool = False) -> Moments:
        if key not in self.moments:
            rows, cols = shape
            self.moments[key] = Moments.zeros(
                rows, cols, device, self.dtype,
                full_inputs=not diagonals, full_outputs=not diagonals and rows <= FULL_FISHER_LIMIT,
            )  # fmt: skip
        return self.moments[key]

"""How classes use their weights, read from their source: transformers' own classes and the forms of a product."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.jetmoe.modeling_jetmoe import JetMoeParallelExperts
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.pytorch_utils import Conv1D

from ciuic_cli.checkpoint.compressible import Use, weight_use


class _Forms(nn.Module):
    """A product of each form; only the source is read."""

    def forward(self, x: torch.Tensor, e: int) -> None:
        F.linear(x, self.linear)
        F.linear(x, weight=self.keyword[e])
        x @ self.right
        x @ self.right_transposed.T
        x.matmul(self.method.transpose(-1, -2))
        torch.matmul(self.left, x)
        torch.bmm(x, self.stack.to(x.dtype))
        F.embedding(x, self.table)
        x * self.gain
        x @ self.slices[:, :2]
        x @ self.both + F.linear(x, self.both)


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("linear", Use.ROWS),
        ("keyword", Use.ROWS),
        ("right", Use.COLUMNS),
        ("right_transposed", Use.ROWS),
        ("method", Use.ROWS),
        ("left", Use.ROWS),
        ("stack", Use.COLUMNS),
        ("table", Use.TABLE),
        ("gain", None),
        ("slices", None),
        ("both", None),
        ("absent", None),
    ],
)
def test_forms_of_products(name: str, use: Use | None) -> None:
    assert weight_use(_Forms, name) is use


def test_classes_of_transformers() -> None:
    found = [
        weight_use(Conv1D, "weight"),
        weight_use(GptOssExperts, "gate_up_proj"),
        weight_use(Llama4TextExperts, "down_proj"),
        weight_use(MixtralExperts, "gate_up_proj"),
        weight_use(JetMoeParallelExperts, "weight"),
        weight_use(MambaMixer, "A_log"),
        weight_use(nn.Conv1d, "weight"),
    ]
    assert found == [Use.COLUMNS, Use.COLUMNS, Use.COLUMNS, Use.ROWS, Use.ROWS, None, None]

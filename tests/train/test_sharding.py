"""Sharded training in two processes (gloo, one torchrun for all tests): losses, bytes per process, the 8-bit wire."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from torchrun import torchrun

WORKER = Path(__file__).parent / "sharding_worker.py"


def run(size: int, *arguments: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(torchrun(WORKER, size, *arguments).strip().splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def two() -> dict[str, Any]:
    return run(2)


def test_losses_are_those_of_one_process(two: dict[str, Any]) -> None:
    import torch

    sys.path.insert(0, str(WORKER.parent))
    from sharding_worker import model_of

    model, exact = model_of(), []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(6):
        ids = torch.randint(0, 250, (4, 24), generator=torch.Generator().manual_seed(step % 3))
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        exact.append(float(loss.detach()))
    assert two["fp32"] == pytest.approx(exact, rel=1e-4)
    assert two["bf16"] == pytest.approx(exact, rel=1e-2)
    assert two["int8"] == pytest.approx(exact, rel=2e-2)
    assert two["int8"] != two["fp32"] and exact[-1] < 0.95 * exact[0]


def test_the_wire_carries_a_quarter(two: dict[str, Any]) -> None:
    traffic = two["int8 traffic"]
    assert 0.25 < traffic["gathered"] / traffic["gathered_uncompressed"] <= 0.26
    assert 0.25 < traffic["reduced"] / traffic["reduced_uncompressed"] <= 0.26
    assert two["frozen bytes"] is True


def test_each_process_has_its_share(two: dict[str, Any]) -> None:
    from sharding_worker import model_of

    total = sum(p.nbytes for p in model_of().parameters())
    layer = sum(p.nbytes for p in model_of().model.layers[0].parameters())
    for found in two["fp32 bytes"]:
        assert found["parameters"] <= 1.02 * total / 2
        assert found["parameters"] + found["states"] <= 1.02 * 3 * total / 2 + layer
        assert found["residuals"] == 0
    assert all(0 < found["residuals"] < 0.27 * total for found in two["int8 bytes"])
    assert "is not sharded" in two["refused"]


def check_shares(found: list[dict[str, int]]) -> None:
    """Every process: its share of weights and states, and at most one layer whole, with the norm that is in none."""
    for one in found:
        assert one["parameters"] <= 1.02 * one["total"] / len(found)
        assert one["states"] <= 1.02 * 2 * one["total"] / len(found)
        norm = 4 * 48
        assert 0 < one["largest"] <= one["whole"] <= 1.02 * (one["largest"] + norm)
        assert one["largest"] < 0.2 * one["total"]


def test_two_processes_hold_halves_and_one_layer(two: dict[str, Any]) -> None:
    check_shares(two["shares"])


@pytest.mark.campaign
def test_four_processes_hold_quarters_and_one_layer() -> None:
    check_shares(run(4, "shares")["shares"])


def test_error_feedback_recovers_what_4_bits_lose(two: dict[str, Any]) -> None:
    """Small gradients beside large ones round to zero, step after step, unless their errors are added up."""
    lost = two["no feedback"] - two["exact"]
    assert two["exact"] < 1 and lost > 100
    assert two["feedback"] - two["exact"] < 0.2 * lost

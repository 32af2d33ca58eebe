"""Faults 30 to 33: targets that cannot be reached, texts that cannot be used, and statistics without full rank."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks import QUICK, Victim, finite_predictions, harmless, invoke, seeded, snapshot

Make = Callable[..., Victim]


# --- 30: targets


@seeded(2, campaign=6)
@pytest.mark.parametrize("bits", ["2,3,4,5,6,8", "4", "8,6"])
@pytest.mark.parametrize("options", [["--dry-run"], []])
def test_fault_30_an_unreachable_ratio(victim: Make, seed: int, bits: str, options: list[str]) -> None:
    v = victim(seed)
    wanted = v.random.choice([40, 900, 12345.6])
    arguments = ["--prune", "off", "--bits", bits]
    done = v.refused(
        "cannot be reached", "the least is", code=4, remedy="--ratio",
        options=[*arguments, "--ratio", wanted, *options], commands=["compress", "replace"],
    )  # fmt: skip
    assert "forward" not in done.stderr, "the run did work before it refused"
    best = re.search(r"--ratio ([0-9.]+)", done.field("try"))
    assert best is not None
    reachable = v.compress(*arguments, "--ratio", best[1], "--dry-run", "--json")
    assert reachable.code == 0, reachable.stderr
    assert json.loads(reachable.stdout)["ratio"] >= float(best[1])
    beyond = v.compress(*arguments, "--ratio", float(best[1]) + 0.02, "--dry-run")
    assert beyond.code == 4


@pytest.mark.parametrize(
    "options",
    [
        *(["--target-size", size] for size in ("1", "3kB")),
        *(["--target-bpw", bits] for bits in ("0.01", "1e-5", "1e-320")),
        *(["--ratio", ratio] for ratio in ("1e9", "1e300")),
    ],
)
def test_fault_30_other_unreachable_targets(victim: Make, options: list[str]) -> None:
    v = victim(1, "llama")
    for more in ([], ["--dry-run"]):
        before = snapshot(v.folder)
        done = invoke(
            "compress", v.model, v.out, "--calibration", v.text, "--calibration-only", *QUICK, *options, *more
        )
        assert done.code == 4 and "cannot be reached" in done.stderr and "--ratio" in done.field("try")
        assert snapshot(v.folder) == before


@pytest.mark.parametrize("size", ["0", "0MB", "0.0GiB"])
def test_fault_30_a_size_of_nothing_is_wrong_usage(victim: Make, size: str) -> None:
    v = victim(1, "llama")
    done = invoke("compress", v.model, v.out, "--target-size", size)
    assert done.code == 2 and "not a positive number of bytes" in done.stderr and done.field("try")


# --- 31: texts


@seeded(1, campaign=4)
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b" \n\t\r\n ", "empty"),
        (b"short text", "tokens"),
        (b"x" * 200, "tokens"),
        (b"\xff\xfe" + "text ".encode("utf-16-le") * 500, "UTF-8"),
        ("caf\u00e9 ".encode("latin-1") * 500, "UTF-8"),
        (b"fine " * 400 + b"\x80", "UTF-8"),
        ("text ".encode("utf-16-le") * 500, "UTF-8"),
    ],
)
def test_fault_31_calibration_text_that_cannot_be_used(
    victim: Make, seed: int, content: bytes, words: str
) -> None:
    v = victim(seed)
    v.text = v.folder / f"text-{seed}.txt"
    v.text.write_bytes(content)
    done = v.refused(words, file=v.text.name, commands=["compress", "replace"])
    assert "forward" not in done.stderr


def test_fault_31_absent_text_a_folder_and_one_bad_of_two(victim: Make, tmp_path: Path) -> None:
    v = victim(0)
    good, bad = v.text, tmp_path / "bad.txt"
    bad.write_bytes(b"\xff")
    v.text = tmp_path / "none.txt"
    v.refused("cannot be read", file="none.txt", commands=["compress"])
    v.text = v.model
    v.refused("the folder has no training data", file="model", commands=["compress"])
    for place in (tmp_path / "pipe", Path("/dev/zero")):  # a pipe never answers, /dev/zero never ends
        if not place.exists():
            os.mkfifo(place)
        v.text = place
        v.refused("not a regular file", file=place.name, commands=["compress"])
        done = invoke("eval", v.model, "--text", place)
        assert done.code == 3 and place.name in done.field("file"), done.stderr
    v.text = good
    v.refused("UTF-8", file="bad.txt", options=["--calibration", bad], commands=["compress"])


def test_fault_31_a_text_of_many_gigabytes(victim: Make, tmp_path: Path) -> None:
    v = victim(0)
    v.text = tmp_path / "large.txt"
    with v.text.open("wb") as file:
        file.truncate(1 << 36)
    v.refused("more than", file="large.txt", remedy="part", commands=["compress"])


@pytest.mark.parametrize("what", ["compress", "eval"])
def test_fault_31_a_text_that_may_not_be_read(
    victim: Make, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    v = victim(0, "llama")
    monkeypatch.setattr("os.access", lambda path, *rest, **named: Path(path) != v.text)
    opened = os.open

    def refuse(path: Any, *rest: Any, **named: Any) -> int:
        if path == v.text:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    done = v.compress() if what == "compress" else invoke("eval", v.model, "--text", v.text)
    assert done.code == 3 and "Permission denied" in done.stderr and v.text.name in done.field("file")
    harmless(done)


# --- 32, 33: statistics


@seeded(1, campaign=4)
def test_fault_32_an_expert_without_a_token(victim: Make, seed: int) -> None:
    v = victim(seed, "deepseek_v3")
    dead = v.random.randrange(6)

    def starve(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("e_score_correction_bias"):
                tensor.fill_(0.0)
                tensor[dead] = -1e4

    v.edit_tensors(starve)
    done, report = v.succeeds()
    experts = [e for row in report["components"] if "experts" in row for e in row["experts"]]
    silent = sum(expert["tokens"] == 0 for expert in experts)
    assert silent >= 4 and report["statistics"]["experts_without_tokens"] == silent
    done.says(f"{silent} expert matrices saw no calibration token")
    finite_predictions(v.out)


@seeded(1, campaign=4)
@pytest.mark.parametrize("way", ["few tokens", "dead inputs", "equal inputs"])
def test_fault_33_a_singular_hessian_is_damped_and_said(victim: Make, seed: int, way: str) -> None:
    v = victim(seed, "llama")

    def degenerate(tensors: dict[str, torch.Tensor]) -> None:
        if way == "dead inputs":
            for name, tensor in tensors.items():
                if name.endswith("layernorm.weight"):
                    tensor[v.random.randrange(len(tensor))] = 0
        elif way == "equal inputs":
            tensors["model.embed_tokens.weight"].copy_(
                tensors["model.embed_tokens.weight"][:, :1].expand(-1, 48)
            )

    v.edit_tensors(degenerate)
    done, report = v.succeeds(*(["--seqlen", 32, "--nsamples", 2] if way == "few tokens" else []))
    if way != "equal inputs":  # the rank falls although enough tokens are counted
        assert report["statistics"]["singular_hessians"] > 0
        done.says("the calibration text does not show how important some inputs are", "more text may help")
    finite_predictions(v.out)

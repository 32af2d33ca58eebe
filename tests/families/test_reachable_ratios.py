"""Every ratio that the error of an unreachable budget names can be had."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from family_table import TEXT
from tiny_families import make_family

from ciuic_cli.checkpoint import architecture
from ciuic_cli.compression.pipeline import compress
from ciuic_cli.errors import InputError, TargetError
from ciuic_cli.runtime import plugin

ALTERNATIVES: dict[str, dict[str, Any]] = {
    "--prune auto": {"prune": "auto"},
    "--bits with 1": {"bits": [1, 2, 2.5, 3, 3.5, 4, 4.5, 5, 5.5, 6, 7, 8]},
}
"""The options that an error names, as arguments of `compress`."""


@pytest.mark.parametrize("family", ["gpt2", "gpt_oss", "qwen2_vl"])
def test_the_ratios_that_the_error_names_succeed(family: str, tmp_path: Path) -> None:
    source, text, out = make_family(family, tmp_path / "model"), tmp_path / "text.txt", tmp_path / "out"
    text.write_text(TEXT)

    def run(ratio: float, **options: Any) -> float:
        given = {"effort": "fast", "nsamples": 6, "seqlen": 48, "prune": "off", **options}
        return compress(
            source, out, ratio=ratio, calibration=[text], calibration_only=True, force=True, **given
        ).ratio

    with pytest.raises(TargetError) as caught:
        run(1000.0)
    remedy = caught.value.remedy or ""
    named = {
        option: float(ratio) for option, ratio in re.findall(r"; (--[^;]*?) allows up to (\d+\.\d\d)", remedy)
    }
    plain = re.search(r"ask for --ratio (\d+\.\d\d) or less", remedy)
    assert plain is not None and named.keys() == ALTERNATIVES.keys(), remedy
    hints = [(float(plain[1]), {}), *((ratio, ALTERNATIVES[option]) for option, ratio in named.items())]
    assert sorted(ratio for ratio, _ in hints)[0] == hints[0][0]
    for ratio, options in hints:
        assert run(ratio, **options) >= ratio
    with pytest.raises(TargetError):
        run(hints[0][0] + 0.02)


def test_a_class_that_is_not_supported_is_named_with_the_highest_ratio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DBRX has all experts of a layer in one flat matrix, 76 % of the weights, which here is not divided."""
    for module in (architecture, plugin):
        monkeypatch.setattr(module, "stack_flat_experts", lambda model: None)
    source, text, out = make_family("dbrx", tmp_path / "model"), tmp_path / "text.txt", tmp_path / "out"
    text.write_text(TEXT)
    given: dict[str, Any] = {"effort": "fast", "nsamples": 6, "seqlen": 48, "calibration": [text]}
    with pytest.raises(InputError, match=r"of the weights are in modules of DbrxExpertGLU") as caught:
        compress(source, out, calibration_only=True, **given)
    assert caught.value.exit_code == 3 and caught.value.tensor == "transformer.blocks.0.ffn.experts.mlp.w1"
    highest = re.search(r"The highest ratio is (\d\.\d\d)$", caught.value.message)
    assert highest is not None and not out.exists()
    report = compress(source, out, calibration_only=True, ratio=float(highest[1]), **given)
    assert report.ratio >= float(highest[1])

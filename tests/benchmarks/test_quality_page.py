"""The measured part of the quality page, and its plot."""

from __future__ import annotations

import importlib
import itertools
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest


def evaluation(divergence: float) -> dict[str, Any]:
    return {
        "kl_mean": divergence, "kl_stderr": divergence / 10, "perplexity_ratio": 1.02,
        "perplexity_ratio_stderr": 0.001, "top1_agreement": 0.9,
    }  # fmt: skip


def row(name: str, bits: float, divergence: float, **texts: float) -> dict[str, Any]:
    found = {"mixed": evaluation(divergence)} | {text: evaluation(kl) for text, kl in texts.items()}
    tool, ours = name.split()[0], name.startswith("ciuic ")
    curve = ours and "," not in name
    return {"name": name, "tool": tool, "ours": ours, "curve": curve, "bpw": bits, "texts": found}


ROWS = [
    row("ciuic 3", 3.0, 0.16),
    row("ciuic 5", 5.0, 0.01),
    row("peer A", 4.5, 0.04),
    row("peer B", 4.9, 0.009),
    row("peer C", 0, 0) | {"texts": {}, "step": "install", "failed": "no `cc`"},
]
RESULTS = {
    "command": "python benchmarks/quality/compare.py m",
    "parameters": 1000,
    "calibration": [64, 512],
    "texts": [{"name": "mixed", "tokens": 8184, "seqlen": 1024, "base_perplexity": 15.0}],
    "contestants": ROWS,
}


def test_bits_for_the_same_divergence() -> None:
    page = importlib.import_module("page")
    curve = [(5.0, 0.01), (3.0, 0.16)]
    assert page.bits_for(0.04, curve) == pytest.approx(4.0)  # two halvings of four
    assert page.bits_for(0.16, curve) == pytest.approx(3.0)
    assert page.bits_for(0.2, curve) is None and page.bits_for(0.009, curve) is None
    assert page.bits_for(0.04, curve[:1]) is None


def test_a_peer_that_is_ahead_is_named() -> None:
    page = importlib.import_module("page")
    assert page.ahead(ROWS, "mixed") == [("peer B", "ciuic 5")]
    assert "peer B (against ciuic 5)" in page.verdict(ROWS, "mixed")
    assert page.verdict(ROWS[:3], "mixed").startswith("No peer")


def test_the_page_has_every_contestant_in_order_of_size() -> None:
    page = importlib.import_module("page")
    lines = page.comparison(RESULTS, "quality.svg").splitlines()
    names = [line.split(" | ")[0].strip("|* ") for line in lines if line.startswith("| ") and "±" in line]
    assert names == ["ciuic 3", "peer A", "peer B", "ciuic 5"]
    (equal,) = [line for line in lines if line.startswith("| peer A")]
    assert equal.endswith("| 4.00 |") and "| 4.500 | 0.0400 ± 0.0040 |" in equal
    assert "- peer C: install failed: `no 'cc'`" in lines
    more = {**RESULTS, "contestants": [*ROWS, row("ciuic 4, best", 4.0, 0.02)]}
    assert equal in page.comparison(more, None).splitlines()  # sizes are compared with the default's
    ratio = [line for line in page.ablation(RESULTS).splitlines() if line.startswith("| peer A")]
    assert ratio[0].endswith("| 0.250 |")


def test_only_the_part_between_the_markers_changes(tmp_path: Path) -> None:
    page = importlib.import_module("page")
    begin, end = page.markers("comparison")
    file = tmp_path / "page.md"
    file.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    page.write(file, "comparison", "new")
    page.write(file, "comparison", "newer")
    assert file.read_text() == f"before\n{begin}\nnewer\n{end}\nafter\n"
    with pytest.raises(ValueError, match="ablation"):
        page.write(file, "ablation", "new")


def test_the_page_in_the_repository_has_both_parts() -> None:
    page = importlib.import_module("page")
    text = (Path(__file__).parents[2] / "docs" / "QUALITY.md").read_text()
    for part in ("comparison", "ablation"):
        assert page.replace_part(text, part, "x") != text


def test_the_plot_places_points_by_logarithm_and_escapes_names() -> None:
    plot = importlib.import_module("plot")
    names = [row("ciuic <3>", 3.0, 0.16, ours=True), row("peer A&B", 4.0, 0.04), row("peer C", 5.0, 0.01)]
    drawing = ElementTree.fromstring(plot.drawing([("a & b", plot.points(names, "mixed"))]))
    space = "{http://www.w3.org/2000/svg}"
    heights = [float(circle.attrib["cy"]) for circle in drawing.iter(f"{space}circle")]
    assert heights[1] - heights[0] == pytest.approx(heights[2] - heights[1], abs=0.2)
    texts = [element.text for element in drawing.iter(f"{space}text")]
    assert {"<3>", "peer A&B", "KL divergence (nats per token), a & b"} <= set(texts)


def test_labels_do_not_cover_each_other() -> None:
    plot = importlib.import_module("plot")
    wanted = [(10.0, 50.0, 8), (12.0, 51.0, 8), (15.0, 53.0, 8), (300.0, 50.0, 8)]
    found = plot.label_places(wanted)
    crowd = sorted(found[:3])
    assert min(b - a for a, b in itertools.pairwise(crowd)) >= plot.LABEL_HEIGHT
    assert found[3] == 50.0
    assert plot.label_places(wanted[:1], [(20.0, 52.0)]) == [52.0 + plot.LABEL_HEIGHT]


def test_marks_of_the_axis() -> None:
    plot = importlib.import_module("plot")
    assert plot.decades(0.008, 0.3) == pytest.approx([0.01, 0.02, 0.05, 0.1, 0.2])
    scale = plot.Scale(0.01, 1.0, 100.0, 0.0, True)
    assert scale(0.1) == pytest.approx(50.0) and math.isclose(scale(1.0), 0.0, abs_tol=1e-9)

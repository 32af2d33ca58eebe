"""Documents and plot made from the results of the quality benchmark."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).parents[2] / "docs"
DOCUMENTS = {
    "comparison": DOCS / "QUALITY.md",
    "tables": DOCS / "experiments/peers/six-texts.md",
    "ablation": DOCS / "experiments/versions/ablation.md",
}


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
    assert "mixed: peer B (against ciuic 5)" in page.verdict(ROWS, ["mixed"])
    assert page.verdict(ROWS[:3], ["mixed"]).startswith("No peer")
    assert page.verdict(ROWS[2:], ["mixed"]) == ""  # without this tool there is nothing to say


def test_the_summary_has_the_divergence_of_every_contestant_in_order_of_size() -> None:
    page = importlib.import_module("page")
    texts = [dict(RESULTS["texts"][0], name=name) for name in ("mixed", "a", "b", "c", "d", "e", "f")]
    rows = [
        row(f"peer {bits}", bits, 0.1, **{text["name"]: 0.2 for text in texts[1:]}) for bits in (5.0, 4.0)
    ]
    found = page.comparison(
        {**RESULTS, "texts": texts, "contestants": [*rows, ROWS[-1]]}, "plot.svg"
    ).splitlines()
    assert "![KL divergence against bits per weight](plot.svg)" in found
    first, second = [
        number for number, line in enumerate(found) if line.startswith("| bits per weight, tool")
    ]
    assert found[first].count("|") == 8 and found[second] == "| bits per weight, tool | f |"
    assert found[first + 2 : first + 4] == [
        f"| {bits}.000 peer {bits}.0 | 0.1000 | 0.2000 | 0.2000 | 0.2000 | 0.2000 | 0.2000 |"
        for bits in (4, 5)
    ]
    assert "- peer C: install failed: `no 'cc'`" in found


def test_the_tables_compare_sizes_with_the_curve_of_the_default_effort() -> None:
    page = importlib.import_module("page")
    lines = page.tables(RESULTS).splitlines()
    names = [line.split(" | ")[0].strip("|* ") for line in lines if line.startswith("| ") and "±" in line]
    assert names == ["ciuic 3", "peer A", "peer B", "ciuic 5"]
    (equal,) = [line for line in lines if line.startswith("| peer A")]
    assert equal.endswith("| 4.00 |") and "| 4.500 | 0.0400 ± 0.0040 |" in equal
    more = {**RESULTS, "contestants": [*ROWS, row("ciuic 4, best", 4.0, 0.02)]}
    assert equal in page.tables(more).splitlines()


def test_the_ablation_compares_with_its_first_row() -> None:
    page = importlib.import_module("page")
    (ratio,) = [line for line in page.ablation(RESULTS).splitlines() if line.startswith("| peer A")]
    assert ratio.endswith("| 0.250 |")


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


@pytest.mark.parametrize("part", DOCUMENTS)
def test_the_documents_have_their_generated_parts(part: str) -> None:
    page = importlib.import_module("page")
    text = DOCUMENTS[part].read_text()
    assert page.replace_part(text, part, "x") != text


@pytest.mark.parametrize("file", sorted(DOCS.rglob("*.md")), ids=lambda file: file.name)
def test_no_table_has_more_than_seven_columns(file: Path) -> None:
    rules = [line for line in file.read_text().splitlines() if line.startswith(("|---", "| ---", "|:--"))]
    assert all(line.count("|") <= 8 for line in rules), rules


def test_publishing_writes_summary_tables_and_plot(tmp_path: Path) -> None:
    page, compare = importlib.import_module("page"), importlib.import_module("compare")
    summary, tables = tmp_path / "QUALITY.md", tmp_path / "tables.md"
    summary.write_text("\n".join(page.markers("comparison")))
    tables.write_text("\n".join(page.markers("tables")))
    compare.publish(RESULTS, summary, tables)
    assert "](quality.svg)" in summary.read_text() and "| 4.500 peer A | 0.0400 |" in summary.read_text()
    assert "### mixed: 8,184 tokens" in tables.read_text()
    assert ElementTree.parse(tmp_path / "quality.svg").getroot().tag.endswith("svg")


def test_the_plot_has_every_point_and_a_line_through_the_default_effort() -> None:
    plot = importlib.import_module("plot")
    rows = [*ROWS[:4], row("ciuic 4, best", 4.0, 0.02)]
    (axes,) = plot.figure([("mixed", plot.points([*rows, ROWS[4]], "mixed"))]).axes
    assert axes.get_yscale() == "log"
    line, *spots = axes.get_lines()
    assert line.get_xydata().tolist() == [[3.0, 0.16], [5.0, 0.01]]
    assert [spot.get_xydata()[0].tolist() for spot in spots] == [
        [one["bpw"], one["texts"]["mixed"]["kl_mean"]] for one in rows
    ]
    looks = {spot.get_label(): (spot.get_color(), spot.get_marker()) for spot in spots}
    assert set(looks) == {"ciuic", "ciuic 4, best", "peer A", "peer B"}
    assert len(set(looks.values())) == 4 and looks["ciuic"][0] == looks["ciuic 4, best"][0]


def test_the_drawing_is_reproducible_and_shows_names_literally(tmp_path: Path) -> None:
    plot = importlib.import_module("plot")
    panels = [("a & b", plot.points([row("peer $<x>$", 4.0, 0.04), row("ciuic 3", 3.0, 0.2)], "mixed"))]
    for name in ("one.svg", "two.svg"):
        plot.write(panels, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    texts = {element.text for element in ElementTree.parse(tmp_path / "one.svg").iter() if element.text}
    assert {"a & b", "peer $<x>$", "ciuic", "KL (nats per token)"} <= texts

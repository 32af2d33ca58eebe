"""The report page is well-formed, self-contained and escaped, and shows the numbers of the report."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from sample_report import REPORT

from ciuic_cli.report.html import render_html
from ciuic_cli.report.schema import MemoryReport, RecoveryPass
from ciuic_cli.report.sentences import large_loss_warning, pass_sentence

VOID = {"meta", "br", "img", "hr", "link", "input"}
HOSTILE = "<script>alert(1)</script>\"'&\x1b[31m\u202e</title></svg>"


class Page(HTMLParser):
    """Collects elements and text; fails if an element is not closed in order."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.words)


@pytest.fixture
def report() -> dict[str, Any]:
    """The sample in its JSON form, for the test to change."""
    return copy.deepcopy(REPORT)


def render(report: dict[str, Any]) -> str:
    return render_html(MemoryReport.from_dict(report))


def warning_of(report: dict[str, Any]) -> str | None:
    return large_loss_warning(MemoryReport.from_dict(report))


def test_page_is_well_formed_and_needs_nothing_else(report: dict[str, Any]) -> None:
    source = render(report)
    page = Page(source)
    names = {tag for tag, _ in page.tags}
    assert {"html", "style", "svg", "table", "title"} <= names
    assert not names & {"script", "link", "img", "iframe", "object"}
    for _, attributes in page.tags:
        assert not {"src", "href", "onload", "onclick"} & attributes.keys()
    assert "prefers-color-scheme: dark" in source
    assert "url(" not in source and "@import" not in source


def test_headline_figures(report: dict[str, Any]) -> None:
    text = Page(render(report)).text
    for figure in ("4.015 : 1", "615 kB", "2.47 MB", "3.985", "0.0123", "0.0234", "1,234,567", "4,321"):
        assert figure in text


def test_title_date_and_command(report: dict[str, Any]) -> None:
    text = Page(render(report)).text
    assert (
        "A language model, compressed 4.01 : 1" in text
        and "ciuic compress MODEL OUT --ratio 4 --seed 0" in text
    )
    report |= {"model": "org/model", "date": "2026-11-25"}
    report["options"] = {"ratio": 4.0, "bits": [2, 2.5], "L": 16, "device": "cpu"}
    page = Page(render(report))
    assert page.words[page.words.index("org/model, compressed 4.01 : 1") :]
    assert (
        "on 2026-11-25" in page.text and "ciuic compress org/model OUT --ratio 4 --bits 2,2.5\n" in page.text
    )


def test_samples(report: dict[str, Any]) -> None:
    assert "Before and after" not in render(report)
    report["samples"] = [{"prompt": "An <i>", "before": "An <i> old", "after": None}]
    page = Page(render(report))
    assert {"original", "An <i> old", "compressed", "not made: see the warnings"} <= set(page.words)


def test_the_scale_of_kl(report: dict[str, Any]) -> None:
    report["measured_kl"], report["predicted_kl"] = 0.01, 0.1
    source = render(report)
    assert re.findall(r'<b class="(\w+)" style="left: ([0-9.]+)%"', source) == [
        ("after", "75.0"),
        ("measured", "50.0"),
    ]
    assert "1.01" in Page(source).text  # e^KL
    report["measured_kl"] = None
    source = render(report)
    assert '<b class="measured"' not in source and "1.105" in Page(source).text


def test_every_expert_has_its_stripe(report: dict[str, Any]) -> None:
    experts = report["components"][1]["experts"]
    experts += [dict(experts[0]) for _ in range(3)]
    svg = re.findall(r'<svg[^>]*viewBox="0 0 5 1".*?</svg>', render(report), re.DOTALL)
    paths = re.findall(r'fill="(#[0-9a-f]{6})" d="M(\d+) 0h(\d+)v1h-\d+z"', svg[0])
    assert [(begin, count) for _, begin, count in paths] == [("0", "1"), ("1", "1"), ("2", "3")]
    assert paths[0][0] == paths[2][0] != paths[1][0] == "#e8a33d"


def test_a_large_loss_is_warned_of(report: dict[str, Any]) -> None:
    assert warning_of(report) is None and "large loss" not in Page(render(report)).text
    for report["measured_kl"], report["predicted_kl"], times in ((1.5, 0.1, "4.5"), (None, 0.7, "2")):
        warning = warning_of(report)
        assert warning is not None and f"about {times} times" in warning and "--ratio" in warning
        assert warning in Page(render(report)).text
    report["measured_kl"], report["predicted_kl"] = 0.1, 0.7  # the measured loss decides
    assert warning_of(report) is None


def test_no_measured_loss(report: dict[str, Any]) -> None:
    report["measured_kl"] = None
    assert "not measured" in Page(render(report)).text


def test_every_component_layer_pass_and_reason_is_shown(report: dict[str, Any]) -> None:
    text = Page(render(report)).text
    assert "65.5 kB → 24.6 kB, 6.00 bits" in text  # the embedding, before and after
    assert "0.00111 → 0.00222; correction 2.00" in text
    for step in MemoryReport.from_dict(report).passes:
        assert pass_sentence(step) in text
    assert "norm: one number per channel" in text and "model.norm.weight" in text
    for note in ("the tied head differs", "multi-token prediction", "7 expert matrices"):
        assert note in text


def test_heat_map_cells(report: dict[str, Any]) -> None:
    source = render(report)
    cells = re.findall(r'<td class="(?:dark|light)" style="background: #[0-9a-f]{6}" title="([^"]*)"', source)
    assert len(cells) == 4  # dense tensors have none
    assert any("experts.down_proj: 3.00 bits, 50.0 % pruned, 1 experts pruned" in cell for cell in cells)
    assert any("layers.2.self_attn.o_proj.weight: 4.25 bits, rank 16" in cell for cell in cells)
    assert ">0.0 – 5.5<" in source  # the experts' range
    assert ">pruned<" in source  # layer 10, in place of its bits


def test_layers_are_in_numerical_order(report: dict[str, Any]) -> None:
    words = [word for word in Page(render(report)).words if re.fullmatch(r"layer \d+", word)]
    layers = ["layer 0", "layer 2", "layer 10"]
    assert words == [*layers, "layer 0", *layers]  # the heat map, the experts, the losses


def test_kept_prediction_layers_have_bits_and_no_loss(report: dict[str, Any]) -> None:
    row = {**report["components"][-2], "name": "model.layers.61.eh_proj.weight", "role": "mtp"}
    report["components"].append({**row, "unpredicted": "no <calibration> of it"})
    report["kept"] = ["layer 61 is <kept>"]
    source = render(report)
    page = Page(source)
    assert "layer 61 is <kept>" in page.text and "no <calibration> of it" in page.text
    assert page.words.count("layer 61") == 1  # in the heat map, not among the losses
    assert "<kept>" not in source


def test_longer_bars_for_more_bytes(report: dict[str, Any]) -> None:
    source = render(report)
    bars = source[source.index("Bytes by component before") :]
    before = float(re.findall(r'class="before" style="width: ([0-9.]+)%"', bars)[0])
    after = float(re.findall(r'class="after" style="width: ([0-9.]+)%"', bars)[0])
    assert before == 100
    assert after / before == pytest.approx(24576 / 65536, abs=0.002)


def test_hostile_names_are_harmless(report: dict[str, Any]) -> None:
    expected = len(Page(render(report)).tags)
    for row in report["components"]:
        row["name"] += HOSTILE
    report["components"][0]["role"] = HOSTILE
    report["components"][-1]["dense"] = HOSTILE
    report["statistics"]["roles"] = {HOSTILE: report["statistics"]["roles"]["o"]}
    report["warnings"] = [HOSTILE]
    report["dropped"] = [HOSTILE]
    report["options"] = {HOSTILE: HOSTILE}
    source = render(report)
    page = Page(source)
    assert "script" not in {tag for tag, _ in page.tags}
    assert len(page.tags) - expected < 8  # a long role takes more lines of text, and no other element
    assert "\x1b" not in source and "\u202e" not in source
    assert "&lt;script&gt;" in source


def test_a_name_of_a_megabyte_is_cut(report: dict[str, Any]) -> None:
    report["components"][0]["name"] = "x" * 1_000_000
    assert len(render(report)) < 40_000


def test_a_model_without_layers_or_probes(report: dict[str, Any]) -> None:
    report["components"] = [report["components"][-1]]
    report["statistics"]["roles"] = {}
    text = Page(render(report)).text
    assert "Predicted and measured" not in text
    assert "model.norm.weight" in text


def test_infinite_losses_do_not_break_the_figures(report: dict[str, Any]) -> None:
    """JSON has no such numbers, but a report in memory may."""
    found = MemoryReport.from_dict(report)
    first, second, *others = found.components
    first = replace(first, predicted_kl=float("inf"))
    second = replace(second, predicted_kl=float("nan"))
    source = render_html(replace(found, components=(first, second, *others)))
    Page(source)
    assert not re.search(r"(?:width|left): (?:inf|nan)", source)


def test_the_sentence_about_recovery() -> None:
    step = RecoveryPass(bytes=0, steps=90, matrices=210, norms=61, kl_before=0.04, kl_after=0.03)
    gained = pass_sentence(step)
    assert "210 matrices and 61 norms" in gained and "0.04 before, 0.03 after" in gained
    assert "were discarded" in pass_sentence(replace(step, kl_after=0.04))

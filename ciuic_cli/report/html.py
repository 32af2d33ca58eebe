"""memory_report.html: the memory report as one page for people.

The page needs nothing else: its style and pictures are inline, there is no script, it follows the reader's
light or dark setting, and every name that came from a file is escaped.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from ciuic_cli.errors import printable
from ciuic_cli.report.readable import readable_bytes
from ciuic_cli.report.sentences import much_is_lost, pass_sentence

Row = Mapping[str, Any]

_LAYER = re.compile(r"(?:^|\.)layers\.([0-9]{1,6})\.")
_STOPS = ((1.0, (222, 234, 246)), (3.0, (134, 182, 226)), (5.0, (62, 122, 196)), (8.0, (22, 58, 126)))
"""Colours of bits per weight, from light to dark; in between they are mixed."""
_PRUNED_COLOUR = "#e8a33d"
_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --ink: #1b2430; --soft: #5c6877;
  --line: #dfe4ea; --before: #b9c3cf; --after: #2f6fc0; --measured: #d9822b; --warn: #fff4dc; }
@media (prefers-color-scheme: dark) { :root { --page: #12161c; --card: #1b212a; --ink: #e6eaf0;
  --soft: #98a5b5; --line: #303946; --before: #515d6c; --after: #5b9be6; --measured: #eda35a;
  --warn: #3a2f18; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1060px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 25px; margin: 0; } h2 { font-size: 18px; margin: 0 0 4px; }
p { margin: 0 0 12px; } .soft { color: var(--soft); }
section, .figure { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
section { padding: 18px 20px; margin-top: 18px; overflow-x: auto; }
.figures { display: grid; gap: 12px; margin-top: 18px;
  grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); }
.figure { padding: 12px 16px; } .figure b { display: block; font-size: 25px; line-height: 1.25; }
.figure span { color: var(--soft); font-size: 13px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top;
  padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; font-size: 13px; } td.n, th.n { text-align: right; }
td.name { overflow-wrap: anywhere; font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 13px; }
details { margin: 6px 0; } summary { cursor: pointer; }
.warn { background: var(--warn); } .warn ul { margin: 0; padding-left: 20px; }
svg { display: block; max-width: 100%; height: auto; }
svg text { fill: var(--ink); font-size: 13px; font-variant-numeric: tabular-nums; }
svg text.soft { fill: var(--soft); }
svg text.small { font-size: 10px; } svg text.light { fill: #ffffff; } svg text.dark { fill: #14202e; }
.before { fill: var(--before); } .after { fill: var(--after); } .measured { fill: var(--measured); }
.key { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin: 0 5px 0 14px; }
"""


def render_html(report: Mapping[str, Any]) -> str:
    """One self-contained page of the content of memory_report.json (see `summary.build_report`)."""
    rows: list[Row] = list(report["components"])
    body = [
        "<header><h1>Memory report</h1>",
        f'<p class="soft">{_subtitle(report)}</p></header>',
        _headline(report),
        _notes(report),
        _section("Bytes by component", "At 2 bytes per weight, and now.", _bytes_by_role(rows)),
        _section(
            "Bits per weight, layer by layer",
            "Stored bits with all scales; small: the least and the most of several matrices or experts."
            + _legend(),
            _heat_maps(rows),
        ),
        _section("Predicted loss, layer by layer", "KL divergence in nats per token.", _loss_by_layer(rows)),
        _section("Predicted and measured", _measured_text(report), _measured(report)),
        _section("Multi-token-prediction layers", _unpredicted(rows), _kept(report)),
        _section("What each pass did", "", _passes(report["passes"])),
        _section("Kept dense", "What was not compressed, and why.", _dense(rows)),
        _section("This run", "", _run_facts(report)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Memory report</title><style>{_STYLE}</style></head><body><main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main></body></html>\n"
    )


def _subtitle(report: Mapping[str, Any]) -> str:
    return (
        f"{report['parameters']:,} parameters: {readable_bytes(report['original_bytes'])} at 2 bytes each, "
        f"{readable_bytes(report['artifact_bytes'])} now"
    )


def _headline(report: Mapping[str, Any]) -> str:
    cards = [
        (f"{report['ratio']:.3f} : 1", "smaller than 2 bytes per weight"),
        (readable_bytes(report["artifact_bytes"]), f"from {readable_bytes(report['original_bytes'])}"),
        (f"{report['bits_per_weight']:.3f}", "bits per weight, everything counted"),
        (_kl(report["predicted_kl"]), "predicted KL, nats per token"),
        (_measured_kl(report), "measured KL, held-out calibration text"),
    ]
    figures = "".join(f'<div class="figure"><b>{_text(a)}</b><span>{_text(b)}</span></div>' for a, b in cards)
    return f'<div class="figures">{figures}</div>'


def _notes(report: Mapping[str, Any]) -> str:
    notes = [str(note) for note in report.get("warnings", ())]
    notes += [f"left out: {note}" for note in report.get("dropped", ())]
    unseen = report.get("statistics", {}).get("experts_without_tokens", 0)
    if unseen:
        notes.append(f"{unseen} expert matrices saw no calibration token; they count as the layer's average")
    if much := much_is_lost(report):
        notes.append(much)
    if not notes:
        return ""
    items = "".join(f"<li>{_text(note, 2000)}</li>" for note in notes)
    return f'<section class="warn"><h2>Warnings</h2><ul>{items}</ul></section>'


def _unpredicted(rows: Sequence[Row]) -> str:
    """Why some matrices have no predicted loss."""
    return _text(" ".join(sorted({row["unpredicted"] for row in rows if "unpredicted" in row})), 2000)


def _kept(report: Mapping[str, Any]) -> str:
    notes = "".join(f"<li>{_text(note, 2000)}</li>" for note in report.get("kept", ()))
    return f"<ul>{notes}</ul>" if notes else ""


def _bytes_by_role(rows: Sequence[Row]) -> str:
    bars = []
    for role, members in _by(rows, "role").items():
        weights = sum(row["parameters"] for row in members)
        nbytes = sum(row["bytes"] for row in members)
        bits = 8 * nbytes / max(1, weights)
        label = f"{readable_bytes(2 * weights)} → {readable_bytes(nbytes)}, {bits:.2f} bits"
        bars.append((role, (2.0 * weights, float(nbytes)), label))
    bars.sort(key=lambda bar: -bar[1][0])
    return _keys(("before", "2 bytes per weight"), ("after", "now")) + _bars(
        bars, ("before", "after"), "Bytes by component before and after"
    )


def _heat_maps(rows: Sequence[Row]) -> str:
    layers: dict[int, list[Row]] = {}
    outside: list[Row] = []
    for row in rows:
        if row.get("dense"):
            continue
        layer = _layer(row)
        (outside if layer is None else layers.setdefault(layer, [])).append(row)
    inside = [(f"layer {layer}", layers[layer]) for layer in sorted(layers)]
    maps = _heat_map(inside, "Bits per weight by layer and component") if inside else ""
    return maps + (_heat_map([("outside", outside)], "Bits per weight outside the layers") if outside else "")


def _heat_map(lines: Sequence[tuple[str, Sequence[Row]]], title: str) -> str:
    roles = list(dict.fromkeys(row["role"] for _, members in lines for row in members))
    left, top, width, height = 80, 48, 78, 34
    parts = []
    for column, role in enumerate(roles):
        words = _wrapped(printable(role, 40))
        for index, word in enumerate(words):
            y = top - 8 - 14 * (len(words) - 1 - index)
            x = left + column * width + width / 2
            parts.append(f'<text class="soft" x="{x:.0f}" y="{y}" text-anchor="middle">{_text(word)}</text>')
    for number, (name, members) in enumerate(lines):
        y = top + number * height
        parts.append(f'<text x="{left - 10}" y="{y + 21}" text-anchor="end">{_text(name)}</text>')
        for role, group in _by(members, "role").items():
            parts.append(_cell(left + roles.index(role) * width, y, width, height, group))
    size = (left + len(roles) * width, top + len(lines) * height + 8)
    return _svg(size, title, parts)


def _cell(x: int, y: int, width: int, height: int, group: Sequence[Row]) -> str:
    bits = 8 * sum(row["bytes"] for row in group) / max(1, sum(row["parameters"] for row in group))
    gone = all(row["pruned"] >= 1 for row in group)
    experts = [expert for row in group for expert in row.get("experts", ())]
    several = [expert["bits"] for expert in experts] or [row["bits"] for row in group]
    lines = [f"{printable(row['name'])}: {row['bits']:.2f} bits{_extras(row)}" for row in group]
    colour, ink = (_PRUNED_COLOUR, "dark") if gone else _colour(bits)
    middle = x + width / 2 - 1
    main = "pruned" if gone else f"{bits:.2f}"
    parts = [
        f"<g><title>{_text(chr(10).join(lines), 4000)}</title>",
        f'<rect x="{x}" y="{y}" width="{width - 3}" height="{height - 3}" rx="4" fill="{colour}"/>',
        f'<text class="{ink}" x="{middle:.0f}" y="{y + (14 if len(several) > 1 else 20)}" '
        f'text-anchor="middle">{main}</text>',
    ]
    if len(several) > 1:
        span = f"{min(several):.1f} – {max(several):.1f}"
        parts.append(
            f'<text class="small {ink}" x="{middle:.0f}" y="{y + 26}" text-anchor="middle">{span}</text>'
        )
    return "".join(parts) + "</g>"


def _extras(row: Row) -> str:
    extras = f", rank {row['rank']}" if row["rank"] else ""
    if row["pruned"]:
        extras += f", {100 * row['pruned']:.1f} % pruned"
    gone = sum(bool(expert["pruned"]) for expert in row.get("experts", ()))
    return extras + (f", {gone} experts left out" if gone else "")


def _loss_by_layer(rows: Sequence[Row]) -> str:
    names: dict[str, float] = {}
    order: dict[str, tuple[int, int]] = {}
    for index, row in enumerate(rows):
        if row.get("dense") or row.get("unpredicted"):
            continue
        layer = _layer(row)
        name = row["role"] if layer is None else f"layer {layer}"
        names[name] = names.get(name, 0.0) + row["predicted_kl"]
        order.setdefault(
            name, (-1 if row["role"] == "embedding" else 1, index) if layer is None else (0, layer)
        )
    bars = [(name, (names[name],), _kl(names[name])) for name in sorted(names, key=lambda name: order[name])]
    return _bars(bars, ("after",), "Predicted loss by layer")


def _measured_kl(report: Mapping[str, Any]) -> str:
    measured = report.get("measured_kl")
    return "not measured" if measured is None else f"{_kl(measured)} ± {report['measured_kl_stderr']:.1g}"


def _measured_text(report: Mapping[str, Any]) -> str:
    text = (
        "Each component alone and all together, before the budget was spent: what the curvature predicts, "
        "and what noise like the code's really does."
    )
    if report.get("measured_kl") is not None:
        text += (
            f" The finished codes together: predicted {_kl(report['predicted_kl'])}, "
            f"measured {_measured_kl(report)} on held-out calibration text."
        )
    return text


def _measured(report: Mapping[str, Any]) -> str:
    roles: Mapping[str, Row] = report.get("statistics", {}).get("roles", {})
    bars = [
        (role, (found["predicted_kl"], found["measured_kl"]),
         f"{_kl(found['predicted_kl'])}, measured {_kl(found['measured_kl'])}; "
         f"counted × {found['correction']:.2f}")
        for role, found in roles.items()
    ]  # fmt: skip
    if not bars:
        return ""
    return _keys(("after", "predicted"), ("measured", "measured")) + _bars(
        bars, ("after", "measured"), "Predicted and measured loss by component"
    )


def _passes(passes: Iterable[Row]) -> str:
    rows = [
        (_text(step["name"]), _text(pass_sentence(step)), readable_bytes(step["bytes"]),
         _kl(step["predicted_kl"]) if "predicted_kl" in step else "")
        for step in passes
    ]  # fmt: skip
    return _table(("pass", "what it did", "bytes", "predicted KL"), rows, numbers=(2, 3))


def _dense(rows: Sequence[Row]) -> str:
    parts = []
    for reason, members in _by([row for row in rows if row.get("dense")], "dense").items():
        cells = [
            (_text(row["name"]), _text(" × ".join(map(str, row["shape"]))), readable_bytes(row["bytes"]),
             f"{row['bits']:.0f}")
            for row in members
        ]  # fmt: skip
        total = readable_bytes(sum(row["bytes"] for row in members))
        table = _table(("tensor", "shape", "bytes", "bits"), cells, numbers=(2, 3), names=(0,))
        parts.append(
            f"<details><summary>{_text(reason, 400)} "
            f'<span class="soft">({len(members)} tensors, {total})</span></summary>{table}</details>'
        )
    return "".join(parts) or "<p>Nothing: every tensor is compressed.</p>"


def _run_facts(report: Mapping[str, Any]) -> str:
    options = ", ".join(f"{key} {value}" for key, value in report.get("options", {}).items())
    facts = [
        (
            "source files",
            f"{readable_bytes(report['source_file_bytes'])}, {report['ratio_to_source_files']:.3f} : 1",
        ),
        ("calibration tokens", f"{report['statistics'].get('tokens', 0):,}"),
        ("time", f"{report['seconds']:.0f} s"),
        ("memory at the peak", readable_bytes(report["peak_rss_bytes"])),
        ("options", options),
    ]
    return _table(("", ""), [(_text(name), _text(value, 2000)) for name, value in facts])


def _bars(bars: Sequence[tuple[str, Sequence[float], str]], classes: Sequence[str], title: str) -> str:
    """Horizontal bars, one group a line: (name, a value for each class, text beside them)."""
    left, room, thick, step = 150, 500, 9, 12 + 10 * len(classes)
    values = [value for _, group, _ in bars for value in group if math.isfinite(value)]
    most = max([value for value in values if value > 0], default=1.0)
    parts = []
    for number, (name, group, label) in enumerate(bars):
        y = number * step + 4
        middle = y + 5 * len(classes) + 4
        parts.append(f'<text x="{left - 10}" y="{middle}" text-anchor="end">{_text(name, 22)}</text>')
        longest = 0.0
        for index, (value, kind) in enumerate(zip(group, classes, strict=True)):
            length = room * value / most if math.isfinite(value) and value > 0 else 0.0
            longest = max(longest, length)
            parts.append(
                f'<rect class="{kind}" x="{left}" y="{y + 10 * index}" width="{max(1.0, length):.1f}" '
                f'height="{thick}" rx="2"/>'
            )
        parts.append(f'<text class="soft" x="{left + longest + 10:.0f}" y="{middle}">{_text(label)}</text>')
    return _svg((1016, len(bars) * step + 8), title, parts)


def _svg(size: tuple[int, int], title: str, parts: Iterable[str]) -> str:
    width, height = size
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="{_text(title)}">{"".join(parts)}</svg>'
    )


def _table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Sequence[int] = (),
    names: Sequence[int] = (),
) -> str:
    """A table; the cells are HTML already."""
    kinds = {**dict.fromkeys(numbers, ' class="n"'), **dict.fromkeys(names, ' class="name"')}
    head = "".join(
        f"<th{kinds.get(i, '') if i in numbers else ''}>{name}</th>" for i, name in enumerate(columns)
    )
    lines = [
        "<tr>" + "".join(f"<td{kinds.get(i, '')}>{cell}</td>" for i, cell in enumerate(row)) + "</tr>"
        for row in rows
    ]
    header = f"<thead><tr>{head}</tr></thead>" if any(columns) else ""
    return f"<table>{header}<tbody>{''.join(lines)}</tbody></table>"


def _section(title: str, text: str, content: str) -> str:
    if not content:
        return ""
    return f'<section><h2>{_text(title)}</h2><p class="soft">{text}</p>{content}</section>'


def _keys(*keys: tuple[str, str]) -> str:
    items = "".join(
        f'<span class="key" style="background: var(--{kind})"></span>{_text(label)}' for kind, label in keys
    )
    return f'<p class="soft">{items}</p>'


def _legend() -> str:
    items = "".join(
        f'<span class="key" style="background: {_colour(bits)[0]}"></span>{bits}' for bits in range(1, 9)
    )
    return f'<br>{items} bits<span class="key" style="background: {_PRUNED_COLOUR}"></span>left out'


def _colour(bits: float) -> tuple[str, str]:
    """Fill of a cell, and the class of the text on it."""
    bits = min(max(bits, _STOPS[0][0]), _STOPS[-1][0])
    mixed = _STOPS[0][1]
    for (low, first), (high, second) in pairwise(_STOPS):
        if low <= bits <= high:
            share = (bits - low) / (high - low)
            red, green, blue = (round(a + share * (b - a)) for a, b in zip(first, second, strict=True))
            mixed = (red, green, blue)
    return "#{:02x}{:02x}{:02x}".format(*mixed), "light" if bits > 4.5 else "dark"


def _by(rows: Iterable[Row], key: str) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(str(row[key]), []).append(row)
    return groups


def _layer(row: Row) -> int | None:
    found = _LAYER.search(str(row["name"]))
    return int(found[1]) if found else None


def _wrapped(role: str) -> list[str]:
    """A role's name in lines of about ten characters, broken at its underscores."""
    lines: list[str] = []
    for word in role.split("_"):
        if lines and len(lines[-1]) + 1 + len(word) <= 10:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _kl(value: float) -> str:
    return f"{value:#.3g}"


def _text(value: object, limit: int = 200) -> str:
    """Anything as harmless text for HTML: controls visible, long names cut, markup escaped."""
    return html.escape("\n".join(printable(line, limit) for line in str(value).split("\n")))

"""memory_report.html: the memory report as one page for people.

The page is self-contained: style and figures are inline, there is no script, and it follows the reader's light or dark
setting. Names that come from files are escaped (see templating.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from ciuic_cli.report.figures import (
    PRUNED_COLOUR,
    BarChart,
    Bars,
    HeatMap,
    bar_chart,
    bits_colour,
    expert_map,
    heat_map,
    kl_scale,
)
from ciuic_cli.report.readable import readable_bytes, readable_kl
from ciuic_cli.report.schema import ComponentReport, MemoryReport
from ciuic_cli.report.sentences import large_loss_warning, pass_sentence, unrouted_experts_warning
from ciuic_cli.report.templating import render_template

_LARGEST_EXPONENT = 700
"""Largest x whose e^x is a float64."""
_LAYER = re.compile(r"(?:^|\.)layers\.([0-9]{1,6})\.")


def render_html(report: MemoryReport) -> str:
    """The report as one HTML page."""
    compressed = [component for component in report.components if component.dense is None]
    return render_template(
        "page.html.jinja",
        report=report,
        title=f"{report.model or 'A language model'}, compressed {report.ratio:.2f} : 1",
        command=_command(report),
        scale=kl_scale(
            [(report.predicted_kl, "predicted", "after"), (report.measured_kl, "measured", "measured")]
        ),
        kl_text=_kl_text(report),
        headline=_headline(report),
        warnings=_warnings(report),
        bytes_chart=_bytes_chart(report.components),
        heat_maps=_heat_maps(compressed),
        experts=expert_map(_layers(compressed)),
        legend=[(bits_colour(bits)[0], bits) for bits in range(1, 9)],
        pruned_colour=PRUNED_COLOUR,
        loss_chart=_loss_chart(compressed),
        probe_chart=_probe_chart(report),
        probe_text=_probe_text(report),
        unpredicted=" ".join(sorted({component.unpredicted or "" for component in compressed})),
        passes=[(result, pass_sentence(result)) for result in report.passes],
        dense=_by_reason(report.components),
        facts=_facts(report),
    )


def _headline(report: MemoryReport) -> list[tuple[str, str]]:
    return [
        (f"{report.ratio:.3f} : 1", "compression of 2 bytes per weight"),
        (readable_bytes(report.artifact_bytes), f"from {readable_bytes(report.original_bytes)}"),
        (f"{report.bits_per_weight:.3f}", "bits per weight, all bytes of the safetensors files counted"),
        (readable_kl(report.predicted_kl), "predicted KL, nats per token"),
        _measured_figure(report),
        (_perplexity_factor(report), "times the original's perplexity, on text that the original writes"),
    ]


def _measured_figure(report: MemoryReport) -> tuple[str, str]:
    if report.measured_kl is None:
        return "not measured", "KL on held-out calibration text"
    return (
        readable_kl(report.measured_kl),
        f"measured KL ± {report.measured_kl_stderr or 0.0:.1g}, on held-out calibration text",
    )


def _perplexity_factor(report: MemoryReport) -> str:
    """e^KL, by the measured KL if there is one: exact for the mean over all texts that the original can write."""
    kl = report.predicted_kl if report.measured_kl is None else report.measured_kl
    return f"{math.exp(kl):.4g}" if kl < _LARGEST_EXPONENT else "∞"


def _command(report: MemoryReport) -> str:
    """The command that makes such an artifact; the options that follow from others are left out."""
    given = {
        key.replace("_", "-"): ",".join(f"{item:g}" for item in value) if isinstance(value, list) else value
        for key, value in report.options.items()
        if key not in ("L", "recovery_steps", "device")
    }
    options = [
        f"--{key} {value:.4g}" if isinstance(value, float) else f"--{key} {value}"
        for key, value in given.items()
    ]
    return " ".join(["ciuic compress", report.model or "MODEL", "OUT", *options])


def _kl_text(report: MemoryReport) -> str:
    kl = report.predicted_kl if report.measured_kl is None else report.measured_kl
    return (
        f"KL divergence from the original, in nats per token{', as predicted' if report.measured_kl is None else ''}: "
        f"{readable_kl(kl)}. On text that the original itself writes, perplexity grows by the factor e^KL, which is "
        f"{_perplexity_factor(report)} here; the scale names it, too. Two computations of one model in bfloat16 differ "
        "by about 0.001."
    )


def _measured_kl(report: MemoryReport) -> str:
    if report.measured_kl is None:
        return "not measured"
    return f"{readable_kl(report.measured_kl)} ± {report.measured_kl_stderr or 0.0:.1g}"


def _warnings(report: MemoryReport) -> list[str]:
    found = [unrouted_experts_warning(report), large_loss_warning(report)]
    return [
        *report.warnings,
        *report.dropped,
        *(warning for warning in found if warning is not None),
    ]


def _bytes_chart(components: Sequence[ComponentReport]) -> BarChart:
    """Bytes by role before and after, the largest first."""
    by_role: dict[str, list[ComponentReport]] = {}
    for component in components:
        by_role.setdefault(component.role, []).append(component)
    lines = []
    for role, members in by_role.items():
        weights = sum(component.parameters for component in members)
        nbytes = sum(component.bytes for component in members)
        bits = 8 * nbytes / max(1, weights)
        label = f"{readable_bytes(2 * weights)} → {readable_bytes(nbytes)}, {bits:.2f} bits"
        lines.append(Bars(role, (2.0 * weights, float(nbytes)), label))
    lines.sort(key=lambda line: -line.values[0])
    return bar_chart("Bytes by component before and after", ("before", "after"), lines)


def _heat_maps(compressed: Sequence[ComponentReport]) -> list[HeatMap]:
    """Bits per weight inside the layers and outside of them."""
    outside = [component for component in compressed if _layer(component) is None]
    maps = []
    if layers := _layers(compressed):
        maps.append(heat_map("Bits per weight by layer and component", layers))
    if outside:
        maps.append(heat_map("Bits per weight outside the layers", [("outside", outside)]))
    return maps


def _layers(compressed: Sequence[ComponentReport]) -> list[tuple[str, list[ComponentReport]]]:
    """Name and components of every layer, in the order of their numbers."""
    layers: dict[int, list[ComponentReport]] = {}
    for component in compressed:
        layer = _layer(component)
        if layer is not None:
            layers.setdefault(layer, []).append(component)
    return [(f"layer {layer}", layers[layer]) for layer in sorted(layers)]


def _loss_chart(compressed: Sequence[ComponentReport]) -> BarChart:
    """Predicted KL by layer: the embedding first, then the layers in order, then what follows them."""
    losses: dict[str, float] = {}
    order: dict[str, tuple[int, int]] = {}
    for index, component in enumerate(compressed):
        if component.unpredicted is not None:
            continue
        layer = _layer(component)
        if layer is not None:
            name, position = f"layer {layer}", (0, layer)
        else:
            name, position = component.role, (-1 if component.role == "embedding" else 1, index)
        losses[name] = losses.get(name, 0.0) + component.predicted_kl
        order.setdefault(name, position)
    names = sorted(losses, key=lambda name: order[name])
    lines = [Bars(name, (losses[name],), readable_kl(losses[name])) for name in names]
    return bar_chart("Predicted KL by layer", ("after",), lines)


def _probe_chart(report: MemoryReport) -> BarChart | None:
    """Predicted and measured KL of the probes by role; None without probes."""
    lines = [
        Bars(
            role,
            (probe.predicted_kl, probe.measured_kl),
            f"{readable_kl(probe.predicted_kl)} → {readable_kl(probe.measured_kl)}; "
            f"correction {probe.correction:.2f}",
        )
        for role, probe in report.statistics.roles.items()
    ]
    if not lines:
        return None
    return bar_chart("Predicted and measured KL by component", ("after", "measured"), lines)


def _probe_text(report: MemoryReport) -> str:
    text = (
        "Probes: noise shaped like rounding error is added to one component at a time, and to all together. The "
        "ratio of measured to predicted KL corrects the predictions of the plan."
    )
    if report.measured_kl is not None:
        text += (
            f" The compressed model: predicted {readable_kl(report.predicted_kl)}, "
            f"measured {_measured_kl(report)} on held-out calibration text."
        )
    return text


def _by_reason(components: Sequence[ComponentReport]) -> dict[str, list[ComponentReport]]:
    """The dense tensors by the reason why they are not compressed."""
    reasons: dict[str, list[ComponentReport]] = {}
    for component in components:
        if component.dense is not None:
            reasons.setdefault(component.dense, []).append(component)
    return reasons


def _facts(report: MemoryReport) -> list[tuple[str, str]]:
    source = f"{readable_bytes(report.source_file_bytes)}, {report.ratio_to_source_files:.3f} : 1"
    seen = report.statistics.vocabulary_seen
    return [
        ("source files", source),
        ("calibration tokens", f"{report.statistics.tokens:,}"),
        *([] if seen is None else [("vocabulary in them", f"{100 * seen:.3g} %")]),
        ("time", f"{report.seconds:.0f} s"),
        ("peak memory", readable_bytes(report.peak_rss_bytes)),
        ("options", ", ".join(f"{key} {value}" for key, value in report.options.items())),
    ]


def _layer(component: ComponentReport) -> int | None:
    """Number of the decoder layer that the tensor belongs to; None outside the layers."""
    match = _LAYER.search(component.name)
    return int(match[1]) if match else None

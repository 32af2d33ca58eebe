"""The results of the commands as tables and text on the terminal; with `--json` nothing of this is printed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ciuic_cli.cli.console import Console
from ciuic_cli.errors import printable
from ciuic_cli.report.readable import count_of, readable_bytes
from ciuic_cli.report.sentences import (
    large_loss_warning,
    padding_sentence,
    pass_sentence,
    unrouted_experts_warning,
    vocabulary_sentence,
)

if TYPE_CHECKING:
    from ciuic_cli.artifact.verification import Verification
    from ciuic_cli.profiling.peaks import AccountRow
    from ciuic_cli.report.inspection import Description
    from ciuic_cli.report.schema import ComponentReport, MemoryReport

_BENCH_BYTES = {
    "file_bytes": "files",
    "weight_bytes": "weights in memory",
    "rss_growth_bytes": "resident, growth by loading",
    "rss_bytes": "resident after loading",
    "peak_growth_bytes": "resident, growth to the peak",
    "peak_rss_bytes": "resident at the peak",
    "gpu_allocated_bytes": "GPU memory of the weights",
    "gpu_peak_bytes": "GPU memory at the peak",
}
_OVERHEAD = "headers and buffers"
"""Table row of the bytes that belong to no parameter."""
_EVALUATION = {
    "perplexity_ratio": "perplexity over the original's",
    "kl_mean": "KL divergence, mean",
    "kl_median": "KL divergence, median",
    "kl_p99": "KL divergence, 99 % quantile",
    "top1_agreement": "same most likely token",
}


def show_compressed(console: Console, report: MemoryReport, title: str) -> None:
    """Print the memory report in short: warnings, bytes and ratio, KL, bytes by role, and what each pass did."""
    _show_notes(console, report)
    source = report.source_file_bytes
    after = _bytes(report.artifact_bytes)
    before_bits = 8 * source / max(1, report.parameters)
    console.table(
        title,
        ["", "before", "after", "ratio"],
        [
            ["at 2 bytes per weight", _bytes(report.original_bytes), after, f"{report.ratio:.3f}"],
            ["files", _bytes(source), after, f"{report.ratio_to_source_files:.3f}"],
            ["bits per weight", f"{before_bits:8.3f}", f"{report.bits_per_weight:8.3f}", ""],
        ],
    )
    tokens = report.statistics.held_out_tokens
    loss = _loss(report.predicted_kl, report.measured_kl, report.measured_kl_stderr, tokens)
    console.data(f"\n{loss}\n")
    overhead = report.artifact_bytes - sum(component.bytes for component in report.components)
    console.table(
        "by component",
        ["", "tensors", "weights", "before", "after", "bits", "predicted KL"],
        [*_roles(report.components), [_OVERHEAD, None, None, "", _bytes(overhead), "", ""]],
        optional=("tensors", "before"),
    )
    console.data("")
    for result in report.passes:
        console.data(f"{result.name}: {pass_sentence(result)}")
    console.data(f"padding: {padding_sentence(report.padding)}")
    if report.coded_on:
        coded = " and ".join(f"{count} on {machine}" for machine, count in report.coded_on.items())
        console.data(f"matrices coded: {coded}")
    if report.statistics.vocabulary_seen is not None:
        console.data(f"vocabulary: {vocabulary_sentence(report.statistics.vocabulary_seen)}")
    console.data(f"{report.seconds:.0f} s, {readable_bytes(report.peak_rss_bytes)} of peak memory")


def _show_notes(console: Console, report: MemoryReport) -> None:
    for note in report.dropped:
        console.warning(note)
    for note in report.kept:
        console.hint(note)
    if warning := unrouted_experts_warning(report):
        console.warning(warning)
    singular = report.statistics.singular_hessians
    if singular:
        console.hint(
            f"the calibration text does not show how important some inputs are, in {singular} of the matrices (too few "
            "tokens, or inputs that are always 0); these inputs count as equally important: more text may help "
            "(--nsamples, --calibration)"
        )
    if warning := large_loss_warning(report):
        console.warning(warning)


def _loss(predicted: float, measured: float | None, stderr: float | None, tokens: int) -> str:
    text = f"KL divergence in nats per token: predicted {predicted:.3g}"
    if measured is None:
        return text
    return f"{text}, measured on {tokens:,} held-out calibration tokens {measured:.3g} ± {stderr or 0.0:.2g}"


def _bytes(count: float) -> str:
    """Readable bytes, padded so that a column of them aligns to the right."""
    return f"{readable_bytes(count):>8}"


def show_account(console: Console, rows: Sequence[AccountRow]) -> None:
    """Print the account of a run, if there is one: a line for each part, then the sums of the phases and of all."""
    if not rows:
        return
    from ciuic_cli.profiling.peaks import phase_sums

    def cells(row: AccountRow) -> list[Any]:
        share = None if row.share is None else f"{row.share:.0%}"
        return [round(row.operations / 1e9, 1), round(row.bytes / 1e9, 1), round(row.seconds, 1), share]

    columns = ["G operations", "GB", "seconds", "of the peak"]
    console.data("")
    console.table(
        "account of this process (seconds of the processor, summed over threads)",
        ["phase", "step", "matrices", *columns],
        [[row.phase, row.step, row.kind, *cells(row)] for row in rows],
    )
    console.data("")
    console.table(
        "account of this process by phase",
        ["phase", *columns],
        [[row.phase, *cells(row)] for row in phase_sums(rows)],
    )


def _roles(components: Sequence[ComponentReport]) -> list[list[object]]:
    """One table row per role, the largest first."""
    by_role: dict[str, list[ComponentReport]] = {}
    for component in components:
        by_role.setdefault(component.role, []).append(component)
    totals = [
        (role, members, sum(component.bytes for component in members)) for role, members in by_role.items()
    ]
    rows: list[list[object]] = []
    for role, members, nbytes in sorted(totals, key=lambda total: -total[2]):
        weights = sum(component.parameters for component in members)
        if all(component.dense is not None for component in members):
            loss = "kept exactly"
        elif any(component.unpredicted is not None for component in members):
            loss = "not predicted"
        else:
            loss = f"{sum(component.predicted_kl for component in members):.2e}"
        bits = f"{8 * nbytes / max(1, weights):5.2f}"
        rows.append([role, len(members), weights, _bytes(2 * weights), _bytes(nbytes), bits, loss])
    return rows


def show_description(console: Console, description: Description, tensors: bool) -> None:
    """Print the kind of a checkpoint or artifact, its bytes by component, and with `tensors` every tensor."""
    for note in (*description.warnings, *description.dropped):
        console.warning(note)
    for note in description.kept:
        console.hint(note)
    formats = ", ".join(
        f"{name} {100 * count / max(1, description.parameters):.3g} %"
        for name, count in description.formats.items()
    )
    architecture = printable(description.architecture or description.model_type)
    size = f"{readable_bytes(description.file_bytes)} in {count_of(description.files, 'file')}"
    console.data(
        f"{description.path}: {description.kind}, {architecture}\n"
        f"{description.parameters:,} parameters, {size}\n"
        f"{description.bits_per_weight:.3f} bits per weight, ratio {description.ratio:.3f} to 2 bytes per weight\n"
        f"weights stored as {formats}\n"
    )
    losses = description.losses
    if losses is not None:
        console.data(_loss(losses.predicted, losses.measured, losses.stderr, losses.held_out_tokens) + "\n")
        if losses.vocabulary_seen is not None:
            console.data(f"vocabulary: {vocabulary_sentence(losses.vocabulary_seen)}\n")
    rows: list[Sequence[object]] = [
        [
            part.role,
            part.tensors,
            part.parameters,
            _bytes(part.bytes),
            f"{part.bits:6.3f}",
            _kl(part.predicted_kl),
        ]
        for part in description.components
    ]
    rows.append([_OVERHEAD, None, None, _bytes(description.overhead_bytes), "", ""])
    columns = 5 if losses is None else 6
    titles = ["", "tensors", "weights", "bytes", "bits", "predicted KL"]
    console.table("by component", titles[:columns], [row[:columns] for row in rows])
    if tensors:
        console.data("")
        console.table(
            "tensors",
            ["name", "component", "shape", "stored", "bytes", "bits", "row groups", "rank", "pruned", "predicted KL"],
            [
                [row.name, row.role, "x".join(map(str, row.shape)), row.stored, row.bytes, f"{row.bits:6.3f}",
                 " ".join(f"{bits:g}:{count}" for bits, count in row.widths.items()), row.rank or None,
                 f"{100 * row.pruned:.1f} %" if row.pruned else "", _kl(row.predicted_kl)]
                for row in description.rows
            ],
            optional=["row groups", "rank", "pruned", "component", "predicted KL", "shape", "stored", "bits"],
        )  # fmt: skip
        reasons = Counter(row.reason for row in description.rows if row.reason)
        for reason, count in reasons.items():
            console.data(f"kept dense ({count} tensors): {reason}")


def _kl(predicted: float | None) -> str:
    return "" if predicted is None else f"{predicted:.2e}"


def show_verification(console: Console, verification: Verification) -> None:
    """Print the damaged files and what is wrong with them, or that all files are intact."""
    console.data("")
    if verification.problems:
        console.table("damaged files", ["file", "what is wrong"], verification.problems)
    else:
        console.data(
            f"all {verification.files} files are intact ({readable_bytes(verification.nbytes)} compared)"
        )
    for name in verification.unlisted:
        console.data(f"{name} has no checksum: it was added after compression")


def show_evaluation(console: Console, evaluation: Mapping[str, Any], title: str) -> None:
    """Print perplexity with its standard error; with a base, the KL from it; the generated texts, if any."""
    rows = [["perplexity", f"{evaluation['perplexity']:.4f} ± {evaluation['stderr']:.4f}"]]
    if "base_perplexity" in evaluation:
        base = f"{evaluation['base_perplexity']:.4f} ± {evaluation['base_stderr']:.4f}"
        rows.append(["perplexity of the original", base])
    rows += [
        [label, _evaluation_cell(key, evaluation[key], evaluation.get(f"{key.removesuffix('_mean')}_stderr"))]
        for key, label in _EVALUATION.items()
        if key in evaluation
    ]
    console.table(f"{title}: {evaluation['tokens']:,} tokens of {evaluation['text']}", ["", "value"], rows)
    for key, label in (("text_before", "before"), ("text_after", "after")):
        if key in evaluation:
            console.data(f"\n{label}: {evaluation[key]}")


def show_task_scores(console: Console, scores: Sequence[Mapping[str, Any]], title: str) -> None:
    """Print one row per metric of each task; with a base, also the difference and the share of flipped answers."""
    has_base = any(score["base_value"] is not None for score in scores)
    columns = ["task", "metric", "documents", *(("original",) if has_base else ()), "model"]
    rows = []
    for score in scores:
        metric = score["metric"] + ("" if score["filter"] == "none" else f" ({score['filter']})")
        cells = [score["task"], metric, score["documents"]]
        if has_base:
            cells.append(_with_error(score["base_value"], score["base_stderr"]))
        cells.append(_with_error(score["value"], score["stderr"]))
        if has_base:
            cells.append(_with_error(score["difference"], score["difference_stderr"], sign="+"))
            cells.append("" if score["flips"] is None else f"{100 * score['flips']:.1f} %")
        rows.append(cells)
    console.table(title, columns + (["difference", "flipped"] if has_base else []), rows)
    if has_base:
        console.data("\nflipped: documents that only one of the two models answers correctly")


def _with_error(value: float, stderr: float | None, sign: str = "") -> str:
    return f"{value:{sign}.4f}" + ("" if stderr is None else f" ± {stderr:.4f}")


def _evaluation_cell(key: str, value: float, stderr: float | None) -> str:
    if key == "top1_agreement":
        return f"{100 * value:.2f} %"
    if key == "perplexity_ratio":
        return f"{value:.4f}" + ("" if stderr is None else f" ± {stderr:.4f}")
    error = "" if stderr is None or not value else f" ± {stderr:.2g}"
    return f"{value:.4g}{error} nats per token"


def show_bench(console: Console, measured: Mapping[str, Any], title: str) -> None:
    """Print memory and speed of the model, and of the original if it was measured."""
    model, base, ratios = measured["model"], measured.get("base"), measured.get("ratios", {})

    def row(key: str, label: str) -> list[str]:
        cells = [label, _bench_cell(key, model[key])]
        if base is not None:
            cells.insert(1, _bench_cell(key, base[key]) if key in base else "")
            cells.append(f"{ratios[key]:.2f}" if key in ratios else "")
        return cells

    rows = [row(key, label) for key, label in _BENCH_BYTES.items() if key in model]
    rows += [
        row("load_seconds", "loading"),
        row("prefill", "prefill, tokens/s"),
        row("decode", "decode, tokens/s"),
    ]
    if "decode_compiled" in model:
        rows.append(row("decode_compiled", "decode by torch.compile, tokens/s"))
    columns = ["", "model"] if base is None else ["", "original", "model", "improvement"]
    console.table(title, columns, rows)
    _show_decode_at(console, model, base)


def _show_decode_at(console: Console, model: Mapping[str, Any], base: Mapping[str, Any] | None) -> None:
    """Print the decoding steps behind each context, if any was measured."""
    labels = {"model": model} if base is None else {"original": base, "model": model}
    steps = {
        label: {step["context"]: step for step in figures.get("decode_at", ())}
        for label, figures in labels.items()
    }
    columns = ["context", *(f"{label}{unit}" for label in labels for unit in (", ms per token", ", GB/s"))]
    rows = []
    for context, step in steps["model"].items():
        cells = [str(context)]
        for label in labels:
            found = steps[label].get(context)
            cells += ["", ""] if found is None else [f"{found['ms_per_token']:.1f}", _bandwidth_cell(found)]
        if base is not None and context in steps["original"]:
            cells.append(f"{steps['original'][context]['ms_per_token'] / step['ms_per_token']:.2f}")
        rows.append(cells)
    if rows:
        columns += ["improvement"] if len(rows[0]) > len(columns) else []
        title = f"decoding steps by context (memory reads {model['bandwidth'] / 1e9:.3g} GB/s)"
        console.table(title, columns, rows)


def _bandwidth_cell(step: Mapping[str, Any]) -> str:
    """Weights read per second, and their share of the memory's bandwidth."""
    return f"{step['bytes_per_second'] / 1e9:.2f} ({100 * step['of_bandwidth']:.0f} %)"


def _bench_cell(key: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{value['mean']:.1f}" + ("" if value["stdev"] is None else f" ± {value['stdev']:.1f}")
    return f"{value:.2f} s" if key == "load_seconds" else readable_bytes(value)

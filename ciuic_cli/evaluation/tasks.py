"""`ciuic eval --tasks`: benchmark tasks of lm-evaluation-harness, on an artifact and on its original.

Both models answer the same documents, so their scores are compared document by document. The standard error of the
difference is that of the paired differences. *Flips* are documents whose answer turned from right to wrong or from
wrong to right ("Accuracy is Not All You Need", Dutta et al. 2024): two models with equal scores can differ in many
answers.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ciuic_cli.checkpoint.folder import locate
from ciuic_cli.errors import CiuicError, EnvironmentFault, InputError, UsageError
from ciuic_cli.evaluation.estimates import Floats
from ciuic_cli.evaluation.opening import expected_bytes, free_memory, open_model, require_runnable
from ciuic_cli.process.memory import configure_allocators, exhaustion
from ciuic_cli.runtime.loading import choose_device
from ciuic_cli.text.tokenizer import open_tokenizer

Samples = dict[tuple[str, str, str], dict[int, float]]
"""(task, metric, filter) -> number of the document -> its score."""


@dataclass(frozen=True)
class TaskScore:
    """One metric of one task, or of a group of tasks over the documents of all of them.

    Attributes:
        metric, filter: as lm-evaluation-harness names them.
        higher_is_better: False for a metric such as perplexity.
        documents: their number.
        value, base_value: means over the documents, of the model and of the original.
        stderr, base_stderr: their standard errors; None for a metric that is no mean over documents.
        difference, difference_stderr: value - base_value, with the standard error of the paired differences.
        flips: share of the documents that only one of the two models answers correctly; None unless scores are 0 or 1.
    """

    task: str
    metric: str
    filter: str
    higher_is_better: bool
    documents: int
    value: float
    stderr: float | None
    base_value: float | None = None
    base_stderr: float | None = None
    difference: float | None = None
    difference_stderr: float | None = None
    flips: float | None = None


def evaluate_tasks(
    path: str | Path,
    tasks: Sequence[str],
    *,
    base: str | Path | None = None,
    include_path: str | Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = 1,
    device: str = "auto",
    hint: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Scores of a model on tasks of lm-evaluation-harness; with `base`, also the original's and the differences.

    Only one of the two models is in memory at a time. On a CPU they compute in float32 if that takes at most half of
    the free memory.

    Args:
        path: an artifact or a checkpoint. base: the original.
        tasks: names of tasks, groups or tags.
        include_path: folder of further task files; code that they refer to is run.
        num_fewshot: examples before each question; default: the task's own.
        limit: documents of each task at most.
        batch_size: documents that are computed together.

    Returns:
        "tasks": the fields of `TaskScore`, one dictionary per score; num_fewshot, limit and the version of lm_eval.

    Raises:
        EnvironmentFault: lm_eval is not installed, or memory does not suffice.
        UsageError: a task does not exist.
        InputError: a model or the data of a task cannot be loaded.
    """
    if find_spec("lm_eval") is None:
        raise EnvironmentFault(
            "benchmark tasks need lm_eval", remedy='install the extra: pip install "ciuic-cli[tasks]"'
        )
    configure_allocators()
    folders = [locate(folder) for folder in (path, base) if folder is not None]
    for folder in folders:
        require_runnable(folder, device)
    manager = _task_manager(include_path)
    names = _known(manager, tasks)
    options = {"num_fewshot": num_fewshot, "limit": limit, "batch_size": batch_size}
    results = [_run(folder, names, manager, device, options, hint) for folder in folders]
    import lm_eval

    return {
        "tasks": [asdict(score) for score in scores(*results)],
        "num_fewshot": num_fewshot,
        "limit": limit,
        "lm_eval": lm_eval.__version__,
    }


def _task_manager(include_path: str | Path | None) -> Any:
    from lm_eval.tasks import TaskManager

    if include_path is not None and not Path(include_path).is_dir():
        raise InputError(
            "there is no such folder of tasks", file=include_path, remedy="give a folder of task files (YAML)"
        )
    try:
        return TaskManager(include_path=None if include_path is None else str(include_path))
    except Exception as error:
        raise InputError(
            f"the task files cannot be read: {type(error).__name__}: {' '.join(str(error).split()):.300}",
            file=include_path,
            remedy="correct them",
        ) from error


def _known(manager: Any, tasks: Sequence[str]) -> list[str]:
    """The tasks, patterns with a * resolved. Raises UsageError for one that does not exist."""
    names = []
    for task in tasks:
        found = manager.match_tasks([task])
        if not found:
            raise UsageError(
                f"there is no task {task!r:.80}",
                remedy="`lm_eval ls tasks` lists them; --include-path adds a folder of task files",
            )
        names += found
    return names


def _run(
    folder: Path,
    tasks: Sequence[str],
    manager: Any,
    device: str,
    options: Mapping[str, Any],
    hint: Callable[[str], None],
) -> dict[str, Any]:
    """lm_eval's result for one model, which is freed afterwards."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    target = choose_device(device)
    dtype = torch.float32 if target.type == "cpu" else None
    if dtype is not None and expected_bytes(folder, dtype) > free_memory(target) // 2:
        dtype = None
        hint(f"{folder}: computes in its own dtype, because float32 takes more than half of the free memory")
    model = open_model(folder, device, dtype)
    try:
        wrapped = HFLM(pretrained=model, tokenizer=open_tokenizer(folder), batch_size=options["batch_size"])
        found = simple_evaluate(
            model=wrapped,
            tasks=list(tasks),
            task_manager=manager,
            num_fewshot=options["num_fewshot"],
            limit=options["limit"],
            log_samples=True,
            bootstrap_iters=0,
        )
    except CiuicError:
        raise
    except Exception as error:  # of lm_eval, of datasets, or of code in a task's file
        fault = exhaustion(error)
        if fault is not None:
            raise fault from error
        raise InputError(
            f"lm_eval cannot run the tasks: {type(error).__name__}: {' '.join(str(error).split()):.400}",
            file=folder,
            remedy="without network, use tasks whose data are local files (--include-path), or data in the cache",
        ) from error
    finally:
        del model
        gc.collect()
    return dict(found)


def scores(model: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> list[TaskScore]:
    """The scores in results of lm_eval's `simple_evaluate` with `log_samples=True`; tasks first, then groups."""
    samples = _samples(model)
    base_samples = _samples(base) if base is not None else {}
    found = []
    for task, metrics in model["results"].items():
        if task in model.get("group_subtasks", {}) and task not in model["samples"]:
            continue
        better = model.get("higher_is_better", {}).get(task, {})
        for key, value in metrics.items():
            metric, _, filter_name = key.partition(",")
            if not filter_name or metric.endswith("_stderr") or not _is_number(value):
                continue
            at = (task, metric, filter_name)
            base_value = None if base is None else base["results"][task][key]
            found.append(
                _score(at, better.get(metric, True), value, samples.get(at), base_value, base_samples.get(at))
            )
    return found + _groups(model, samples, base_samples if base is not None else None)


def _score(
    at: tuple[str, str, str],
    higher_is_better: bool,
    value: float,
    documents: Mapping[Any, float] | None,
    base_value: float | None,
    base_documents: Mapping[Any, float] | None,
) -> TaskScore:
    """One score. documents: score of each document; used only where `value` is their mean."""
    ours = _column(documents, value)
    theirs = _column(base_documents, base_value)
    score = TaskScore(
        *at, higher_is_better, len(documents or ()), value, _stderr(ours), base_value, _stderr(theirs)
    )
    if base_value is None:
        return score
    stderr = flips = None
    if ours is not None and theirs is not None and documents and base_documents:
        if documents.keys() != base_documents.keys():
            raise RuntimeError(f"the models answered other documents of {at[0]}")
        paired = ours - theirs
        stderr = _stderr(paired)
        if set(np.unique([ours, theirs])) <= {0.0, 1.0}:
            flips = float(np.mean(paired != 0))
    return replace(score, difference=value - base_value, difference_stderr=stderr, flips=flips)


def _column(documents: Mapping[Any, float] | None, value: float | None) -> Floats | None:
    """Scores in the order of the documents; None if the task's value is not their mean (perplexity, F1)."""
    if not documents or value is None:
        return None
    column = np.array([documents[key] for key in sorted(documents)], dtype=np.float64)
    return column if math.isclose(column.mean(), value, rel_tol=1e-9, abs_tol=1e-9) else None


def _stderr(column: Floats | None) -> float | None:
    """Standard error of the mean of independent documents."""
    if column is None or column.size < 2:
        return None
    return float(column.std(ddof=1) / math.sqrt(column.size))


def _samples(result: Mapping[str, Any]) -> Samples:
    """The scores of single documents, where they are numbers."""
    found: Samples = {}
    for task, samples in result["samples"].items():
        for sample in samples:
            for metric in sample.get("metrics", ()):
                if _is_number(sample.get(metric)):
                    at = (task, metric, str(sample.get("filter", "none")))
                    found.setdefault(at, {})[int(sample["doc_id"])] = float(sample[metric])
    return found


def _groups(model: Mapping[str, Any], samples: Samples, base: Samples | None) -> list[TaskScore]:
    """The scores of groups: means over the documents of all their tasks."""
    members: Mapping[str, Sequence[str]] = model.get("group_subtasks", {})

    def tasks_of(name: str) -> list[str]:
        inner = [task for member in members.get(name, ()) for task in tasks_of(member)]
        return inner or [name]

    found = []
    for group in members:
        tasks = tasks_of(group)
        if tasks == [group]:
            continue
        kinds = [{at[1:] for at in samples if at[0] == task} for task in tasks]
        for metric, filter_name in sorted(set.intersection(*kinds)):
            pooled = [
                {
                    (task, number): score
                    for task in tasks
                    for number, score in part.get((task, metric, filter_name), {}).items()
                }
                for part in (samples, base)
                if part is not None
            ]
            means = [float(np.mean(list(documents.values()))) for documents in pooled]
            better = model.get("higher_is_better", {}).get(tasks[0], {}).get(metric, True)
            other = (means[1], pooled[1]) if base is not None else (None, None)
            found.append(_score((group, metric, filter_name), better, means[0], pooled[0], *other))
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, (bool, int, float, np.number)) and math.isfinite(float(value))

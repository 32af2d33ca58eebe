"""`eval --tasks`: scores, paired differences and flips, from results of lm_eval and by running it on a local task."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from ciuic_cli.cli.app import app
from ciuic_cli.errors import EnvironmentFault, InputError, UsageError
from ciuic_cli.evaluation import tasks as module
from ciuic_cli.evaluation.tasks import TaskScore, evaluate_tasks, scores

TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
DOCUMENTS = [
    {
        "question": "The river runs past the old",
        "choices": [" mill", " lamp", " king"][: 2 + n % 2],
        "answer": n % 2,
    }
    for n in range(12)
]


def result(**by_task: list[float]) -> dict[str, Any]:
    """A result of lm_eval with these scores of documents, in one group."""
    return {
        "results": {"all": {"acc,none": 0.5}} | {
            task: {"acc,none": float(np.mean(values)), "acc_stderr,none": "N/A", "alias": task, "f1,none": 0.25}
            for task, values in by_task.items()
        },
        "samples": {
            task: [
                {"doc_id": number, "filter": "none", "metrics": ["acc", "f1"], "acc": value, "f1": (1, 2)}
                for number, value in enumerate(values)
            ]
            for task, values in by_task.items()
        },
        "group_subtasks": {"all": list(by_task)},
        "higher_is_better": {task: {"acc": True, "f1": True} for task in by_task},
    }  # fmt: skip


def test_differences_are_paired_and_flips_counted() -> None:
    ours, theirs = [1.0, 0, 1, 1, 0, 0, 1, 1], [1.0, 1, 0, 1, 0, 0, 1, 0]
    found = {(score.task, score.metric): score for score in scores(result(a=ours), result(a=theirs))}
    score = found["a", "acc"]
    assert (score.value, score.base_value, score.difference, score.flips) == (0.625, 0.5, 0.125, 0.375)
    assert score.difference_stderr == pytest.approx(np.std(np.subtract(ours, theirs), ddof=1) / math.sqrt(8))
    assert score.stderr == pytest.approx(math.sqrt(0.625 * 0.375 / 7)) and score.documents == 8
    f1 = found["a", "f1"]  # no mean over documents: values without errors
    assert (f1.value, f1.difference, f1.stderr, f1.difference_stderr, f1.flips) == (
        0.25,
        0.0,
        None,
        None,
        None,
    )


def test_a_group_pools_the_documents_of_its_tasks() -> None:
    found = scores(result(a=[1.0, 0, 1], b=[0.0]), result(a=[1.0, 1, 1], b=[1.0]))
    group = next(score for score in found if score.task == "all")
    assert (group.documents, group.value, group.base_value, group.flips) == (4, 0.5, 1.0, 0.5)
    assert [score.task for score in scores(result(a=[1.0, 0]))] == ["a", "a", "all"]


def test_scores_that_are_no_answers_have_no_flips() -> None:
    found = scores(result(a=[0.5, 0.25]), result(a=[0.5, 0.75]))
    assert found[0].flips is None and found[0].difference == -0.25 and found[0].difference_stderr is not None


def test_models_must_have_answered_the_same_documents() -> None:
    with pytest.raises(RuntimeError, match="other documents"):
        scores(result(a=[1.0, 0]), result(a=[1.0, 0, 1]))


def test_without_lm_eval(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentFault, match="lm_eval") as caught:
        evaluate_tasks(tmp_path, ["a"])
    assert "ciuic-cli[tasks]" in (caught.value.remedy or "")


@pytest.mark.parametrize(
    "options", [["--tasks", "a", "--text", "x"], ["--tasks", "a", "--seqlen", "64"], ["--num-fewshot", "1"]]
)
def test_options_of_the_other_measurement_are_refused(tmp_path: Path, options: list[str]) -> None:
    found = CliRunner().invoke(app, ["eval", str(tmp_path), *options])
    assert found.exit_code == 2 and "--tasks" in found.stderr


@pytest.fixture(scope="module")
def local_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install '.[tasks]'")
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    (folder / "rivers.yaml").write_text(TASK.format(name="rivers", data=data))
    return folder


def test_a_local_task_on_an_artifact_and_its_original(
    artifact: tuple[Path, Path], local_tasks: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    original, out = artifact
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    arguments = [
        "eval",
        out,
        "--base",
        original,
        "--tasks",
        "rivers",
        "--include-path",
        local_tasks,
        "--json",
    ]
    found = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert found.exit_code == 0, found.stderr
    (score,) = (TaskScore(**score) for score in json.loads(found.stdout)["tasks"])
    assert (score.task, score.metric, score.documents) == ("rivers", "acc", len(DOCUMENTS))
    assert score.value == pytest.approx(accuracy(out)) and score.base_value == pytest.approx(
        accuracy(original)
    )
    assert score.difference == pytest.approx(score.value - score.base_value)
    assert score.flips is not None and score.flips >= abs(score.difference) - 1e-12


def accuracy(folder: Path) -> float:
    """Share of documents whose right choice has the highest log-likelihood, without lm_eval."""
    import torch

    from ciuic_cli.evaluation.opening import open_model
    from ciuic_cli.text.tokenizer import open_tokenizer

    model, tokenizer = open_model(folder, "cpu", torch.float32), open_tokenizer(folder)
    right = []
    for document in DOCUMENTS:
        start = tokenizer(document["question"])["input_ids"]
        likelihoods = []
        for choice in document["choices"]:
            ids = torch.tensor([tokenizer(document["question"] + choice)["input_ids"]])
            with torch.no_grad():
                log = model(input_ids=ids).logits[0].double().log_softmax(-1)
            taken = log[len(start) - 1 : -1].gather(1, ids[0, len(start) :, None])
            likelihoods.append(float(taken.sum()))
        right.append(int(np.argmax(likelihoods)) == document["answer"])
    return float(np.mean(right))


def test_unknown_tasks_and_folders(artifact: tuple[Path, Path], local_tasks: Path) -> None:
    with pytest.raises(UsageError, match="no task 'nowhere'"):
        evaluate_tasks(artifact[1], ["nowhere"], include_path=local_tasks, device="cpu")
    with pytest.raises(InputError, match="no such folder of tasks"):
        evaluate_tasks(artifact[1], ["rivers"], include_path=local_tasks / "absent", device="cpu")

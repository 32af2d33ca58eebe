"""Recipes: what they may contain, what is refused, and that an artifact's recipe makes the same weights again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from ciuic_cli.cli.app import app
from ciuic_cli.compression.options import CompressOptions
from ciuic_cli.compression.recipe import KEYS, read_recipe, write_recipe
from ciuic_cli.errors import InputError, UsageError
from ciuic_cli.recipes import RECIPE


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        file = tmp_path / "given.yaml"
        file.write_text(text)
        return file

    return write


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_keys_are_options_with_either_dash(recipe: Callable[[str], Path]) -> None:
    found = read_recipe(
        recipe("target-bpw: 3\nnum: \n".replace("num", "seqlen") + "prune: off\nbits: [2, 2.5]\n")
    )
    assert found == {"target_bpw": 3, "prune": "off", "bits": [2, 2.5]}
    assert CompressOptions(**found).bits == (2, 2.5)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("rotio: 4", UsageError, "unknown key 'rotio'"),
        ("dry_run: true", UsageError, "unknown key 'dry_run'"),
        ("ratio: 4\nratio: 5", UsageError, "twice"),
        ("target-bpw: 4\ntarget_bpw: 5", UsageError, "twice"),
        ("ratio: {a: 1}", UsageError, "nested"),
        ("bits: [[2]]", UsageError, "nested"),
        ("seed: 1:30", UsageError, "1:30, which YAML reads in base 60"),
        ("bits: [2, 1:30.5]", UsageError, "1:30.5, which YAML reads in base 60"),
        ("- ratio", UsageError, "no options"),
        ("", UsageError, "no options"),
        ("ratio: [", InputError, "not YAML"),
        ("ratio: !!python/object:os.system x", InputError, "not YAML"),
        ("x" * 70_000, InputError, "at most"),
    ],
)
def test_what_is_refused(
    recipe: Callable[[str], Path], text: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        read_recipe(recipe(text))


def test_a_written_recipe_gives_the_same_options(tmp_path: Path) -> None:
    options = CompressOptions(
        target_size=4365952, calibration=(Path("a b.txt"),), calibration_only=True, nsamples=3, prune="off",
        rank=32, bits=(2, 4.5), seed=7,
        effort="fast", mtp="keep", prompt="The river: a name",
    )  # fmt: skip
    write_recipe(options, tmp_path)
    assert CompressOptions(**read_recipe(tmp_path / RECIPE)) == options
    write_recipe(CompressOptions(), tmp_path)
    assert read_recipe(tmp_path / RECIPE)["ratio"] == 4
    assert set(KEYS) - set(read_recipe(tmp_path / RECIPE)) == {
        *(
            "target_bpw",
            "target_size",
            "calibration",
            "nsamples",
            "seqlen",
            "states",
            "time_budget",
            "device",
        ),
        "prompt",
    }


def test_an_unknown_key_is_wrong_usage(recipe: Callable[[str], Path], tmp_path: Path) -> None:
    done = invoke("compress", tmp_path, tmp_path / "out", "--config", recipe("rotio: 4"))
    assert done.exit_code == 2 and "'rotio'" in done.stderr and "did you mean ratio?" in done.stderr
    done = invoke("compress", tmp_path, tmp_path / "out", "--config", recipe("ratio: many"))
    assert done.exit_code == 2 and "--ratio 'many'" in done.stderr
    done = invoke("compress", tmp_path, tmp_path / "out", "--config", tmp_path / "absent.yaml")
    assert done.exit_code == 3 and "absent.yaml" in done.stderr


def test_an_artifact_s_recipe_makes_the_same_weights(
    tiny_checkpoint: Callable[..., Path], text: Path, tmp_path: Path, recipe: Callable[[str], Path]
) -> None:
    """The command line comes before the recipe, also for another kind of budget; --quiet prints no progress."""
    model, first, second = tiny_checkpoint("llama"), tmp_path / "first", tmp_path / "second"
    given = f"target-bpw: 8\nbits: 3,4,5\nnsamples: 4\nseqlen: 64\neffort: fast\ncalibration: {text}\n"
    given += "calibration-only: true\n"
    done = invoke("compress", model, first, "--config", recipe(given), "--ratio", 3, "--seed", 5, "--quiet")
    assert done.exit_code == 0, done.stderr
    assert done.stderr == "" and "ratio" in done.stdout
    stored = yaml.safe_load((first / RECIPE).read_text())
    assert (stored["ratio"], stored["seed"], stored["bits"]) == (
        3,
        5,
        [3, 4, 5],
    ) and "target_bpw" not in stored
    assert invoke("compress", model, second, "--config", first / RECIPE).exit_code == 0
    assert (second / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()
    assert invoke("inspect", second, "--verify").exit_code == 0

"""The model card: its metadata and text, and how origin and licence of the original are found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from sample_report import REPORT

from ciuic_cli.checkpoint.model_map import map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.report.model_card import Source, render_card, source_of
from ciuic_cli.report.schema import MemoryReport


@pytest.fixture
def folder(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    return shutil.copytree(tiny_checkpoint("llama"), tmp_path / "original")


def source(folder: Path) -> Source:
    return source_of(map_model(open_checkpoint(folder)))


def named(folder: Path, name: Any) -> Path:
    """The checkpoint with this origin in its config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "_name_or_path": name}))
    return folder


def test_metadata_and_body() -> None:
    licence = {"license": "other", "license_name": "some: licence", "license_link": "LICENSE"}
    text = render_card(MemoryReport.from_dict(REPORT), Source("llama", "org/model", licence))
    card = ModelCard(text)
    assert card.data.to_dict() == {
        "base_model": "org/model",
        "base_model_relation": "quantized",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["ciuic", "compressed"],
        **licence,
    }
    assert "[org/model](https://huggingface.co/org/model)" in card.text
    for figure in ("compressed llama model", "2.47 MB", "615 kB", "3.985 bits per weight", "4.015:1", "0.0123",
                   "measured 0.0234 ± 0.0012 on 512 tokens"):  # fmt: skip
        assert figure in card.text
    assert text.endswith("\n") and not text.endswith("\n\n")


def test_an_unknown_origin_is_not_named() -> None:
    report = replace(MemoryReport.from_dict(REPORT), measured_kl=None, measured_kl_stderr=None)
    card = ModelCard(render_card(report, Source("llama")))
    assert not {"base_model", "base_model_relation", "license"} & card.data.to_dict().keys()
    assert "not measured" in card.text and "huggingface.co" not in card.text


def test_the_origin_is_the_hub_id_of_the_cache_or_of_the_config(folder: Path, tmp_path: Path) -> None:
    assert source(folder) == Source("llama")
    assert source(named(folder, "org/from-config")).base_model == "org/from-config"
    snapshot = tmp_path / "models--org--from_cache" / "snapshots" / "0123abcd"
    shutil.copytree(folder, snapshot)
    assert source(snapshot).base_model == "org/from_cache"


@pytest.mark.parametrize(
    "name", ["", "./out", "/home/me/model", "../model", "a/b/c", "org/model](http://x)", "org/a\nb", 3, None]
)
def test_an_origin_that_is_no_hub_id_is_ignored(folder: Path, name: Any) -> None:
    assert source(named(folder, name)).base_model is None


def test_the_licence_is_copied_from_the_original_s_card(folder: Path) -> None:
    card = folder / "README.md"
    card.write_text("---\nlicense: mit\ntags: [a]\n---\n# A model\n")
    assert source(folder).license == {"license": "mit"}
    card.write_text("---\nlicense: other\nlicense_name: l\nlicense_link: https://x\n---\n")
    assert source(folder).license == {"license": "other", "license_name": "l", "license_link": "https://x"}


@pytest.mark.parametrize(
    "content",
    [
        b"# no front matter", b"---\nlicense: [mit, x]\n---\n", b"---\nlicense: 3\n---\n", b"---\n- a\n---\n",
        b"---\nlicense: {a\n---\n", b"---\nlicense: !!python/object/apply:os.system [true]\n---\n", b"\xff\xfe\x00",
        b"---\nlicense: " + b"x" * 1000 + b"\n---\n", b"---\na: " + b"[" * 5000 + b"\n---\n",
        b"---\nlicense: mit\n---\n" + b" " * (1 << 20), b"---\nlicense: !!int ''\n---\n",
        b"---\nlicense: !!bool x\n---\n", b"---\nlicense: !!timestamp x\n---\n",
    ],
)  # fmt: skip
def test_a_damaged_card_of_the_original_does_no_harm(folder: Path, content: bytes) -> None:
    (folder / "README.md").write_bytes(content)
    assert source(folder).license == {}


def test_a_card_outside_the_folder_is_not_read(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere.md").write_text("---\nlicense: mit\n---\n")
    (folder / "README.md").symlink_to(tmp_path / "elsewhere.md")
    assert source(folder).license == {}

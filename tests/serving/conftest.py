"""Artifacts of the sample model: as it is, which means without a chat template, and with one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ciuic_cli import compress

SAMPLE = Path(__file__).parents[2] / "samples" / "deepseek-v3-tiny"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n"
    "{% endfor %}assistant:"
)


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sample") / "out"
    compress(SAMPLE, out, effort="fast", nsamples=4, seqlen=64)
    return out


@pytest.fixture(scope="session")
def chatting(sample: Path) -> Path:
    folder = sample.parent / "chatting"
    shutil.copytree(sample, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder

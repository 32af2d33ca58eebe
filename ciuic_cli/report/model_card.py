"""README.md of an artifact: a model card that says what the folder is, how to load it, and what it lost.

Nothing here uses the network.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ciuic_cli._version import __version__
from ciuic_cli.artifact.writer import REPORT
from ciuic_cli.checkpoint.config.classes import auto_class
from ciuic_cli.checkpoint.folder import checked_file
from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.errors import CiuicError
from ciuic_cli.report.readable import readable_bytes
from ciuic_cli.report.schema import MemoryReport

_TEMPLATE = Path(__file__).parent / "templates" / "model_card.md.jinja"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_PIPELINES = {"AutoModelForCausalLM": "text-generation", "AutoModelForImageTextToText": "image-text-to-text"}
"""The hub's name of what a model does, by the class that loads it."""
_LICENSE_KEYS = ("license", "license_name", "license_link")
_MAX_CARD_BYTES = 1 << 20
"""Largest README.md of an original whose metadata is read (chosen)."""
_MAX_NAME = 200
"""Longest name of an original in a report that a message repeats, in characters (chosen)."""
_MAX_LICENSE = 300
"""Longest value of a licence key that is copied, in characters (chosen)."""


@dataclass(frozen=True)
class Source:
    """The original model, as far as a model card names it.

    base_model: its id on the hub, if known. license: the keys license, license_name and license_link of its own card.
    auto_class: transformers' class that loads the model.
    """

    model_type: str
    base_model: str | None = None
    license: dict[str, str] = field(default_factory=dict)
    auto_class: str = "AutoModelForCausalLM"


def source_of(model_map: ModelMap) -> Source:
    """The original as the checkpoint's folder and config.json describe it."""
    folder = model_map.checkpoint.folder
    base_model = _hub_id(folder) or _named_in_config(model_map.checkpoint.config)
    auto = auto_class(model_map.config)
    return Source(str(model_map.config.model_type), base_model, _license_of(folder), auto.__name__)


def render_card(report: MemoryReport, source: Source) -> str:
    """The model card as Markdown with the metadata that model hubs read."""
    from huggingface_hub import ModelCard, ModelCardData

    license_keys: dict[str, Any] = dict(source.license)
    data = ModelCardData(
        base_model=source.base_model,
        base_model_relation=None if source.base_model is None else "quantized",
        library_name="transformers",
        pipeline_tag=_PIPELINES[source.auto_class],
        tags=["ciuic", "compressed"],
        **license_keys,
    )
    measured = "not measured"
    if report.measured_kl is not None:
        measured = (
            f"measured {report.measured_kl:.3g} ± {report.measured_kl_stderr or 0.0:.2g} on "
            f"{report.statistics.held_out_tokens:,} tokens of held-out calibration text"
        )
    card = ModelCard.from_template(
        data,
        template_str=_TEMPLATE.read_text(encoding="utf-8"),
        model_type=source.model_type,
        auto_class=source.auto_class,
        base_model=source.base_model,
        before=readable_bytes(report.original_bytes),
        after=readable_bytes(report.artifact_bytes),
        bits_per_weight=f"{report.bits_per_weight:.3f}",
        ratio=f"{report.ratio:.3f}",
        version=__version__,
        predicted_kl=f"{report.predicted_kl:.3g}",
        measured_kl=measured,
    )
    return f"{card}\n"


def name_of(folder: Path) -> str:
    """A name of the original for readers: its hub id if its folder is in the hub's cache, else the folder's name."""
    return _hub_id(folder) or folder.resolve().name


def _hub_id(folder: Path) -> str | None:
    """The hub id of a folder in the hub's cache, models--ORG--NAME/snapshots/REVISION; None for other folders."""
    snapshots = folder.resolve().parent
    parts = snapshots.parent.name.split("--")
    if snapshots.name != "snapshots" or parts[0] != "models":
        return None
    return _checked_id("/".join(parts[1:]))


def _named_in_config(config: dict[str, Any]) -> str | None:
    """The hub id that transformers wrote into config.json as the origin of the weights."""
    return _checked_id(config.get("_name_or_path"))


def _checked_id(name: object) -> str | None:
    return name if isinstance(name, str) and _HUB_ID.fullmatch(name) else None


def original_of(artifact: Path) -> str | None:
    """The original of an artifact: a hub id from its card, or a folder from its report; None if neither names it."""
    if known := _checked_id(_metadata(artifact).get("base_model")):
        return known
    try:
        name = json.loads(checked_file(artifact, REPORT).read_text(encoding="utf-8")).get("model")
    except (OSError, ValueError, AttributeError, CiuicError):  # the name is only for a message
        return None
    return name if isinstance(name, str) and 0 < len(name) <= _MAX_NAME and name.isprintable() else None


def _license_of(folder: Path) -> dict[str, str]:
    """The licence keys in the front matter of the original's README.md; empty if there is none that can be read."""
    metadata = _metadata(folder)
    found = {key: metadata[key] for key in _LICENSE_KEYS if key in metadata}
    return {
        key: value for key, value in found.items() if isinstance(value, str) and len(value) <= _MAX_LICENSE
    }


def _metadata(folder: Path) -> dict[str, Any]:
    """The front matter of a folder's README.md; empty if there is none that can be read.

    The file is optional and anyone may have written it, so whatever is wrong with it is ignored.
    """
    from huggingface_hub import metadata_load

    try:
        file = checked_file(folder, "README.md")
        if file.stat().st_size > _MAX_CARD_BYTES:
            return {}
        metadata = metadata_load(file) or {}
    except (
        Exception
    ):  # PyYAML fails with nearly any type (IndexError for "!!int ''"); no licence is no reason to stop
        return {}
    return metadata if isinstance(metadata, dict) else {}

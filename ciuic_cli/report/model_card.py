"""README.md of an artifact: what it is, how it is loaded, what it lost, for whoever finds the folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ciuic_cli._version import __version__
from ciuic_cli.report.readable import readable_bytes

_CARD = """\
---
library_name: transformers
tags:
- ciuic
- compressed
---
# A compressed {model_type} model

The weights of the original, {before}, in {after}: {bits:.3f} bits per weight, {ratio:.3f}:1, every stored
byte counted. Made by ciuic {version}.

## Load it

The package `ciuic-cli` has to be imported first: transformers does not know the format without it.

```python
import ciuic_cli
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```

The weights stay compressed in memory. `ciuic inspect --verify` compares every file with its checksum.

## What it lost

KL divergence from the original's predictions, in nats per token: predicted {predicted:.3g}, {measured}.
`ciuic eval` with `--base` measures it on a text of yours. `memory_report.html` is the whole account, tensor by tensor.

The terms of the original's licence hold for this copy too.
"""


def render_card(report: Mapping[str, Any], model_type: str) -> str:
    """Markdown with the metadata that model hubs read. report: content of memory_report.json."""
    measured = "not measured"
    if report["measured_kl"] is not None:
        tokens = report["statistics"]["held_out_tokens"]
        spread = f"{report['measured_kl']:.3g} ± {report['measured_kl_stderr']:.2g}"
        measured = f"measured {spread} on {tokens:,} tokens of held-out calibration text"
    return _CARD.format(
        model_type=model_type, version=__version__, measured=measured, ratio=report["ratio"],
        before=readable_bytes(report["original_bytes"]), after=readable_bytes(report["artifact_bytes"]),
        bits=report["bits_per_weight"], predicted=report["predicted_kl"],
    )  # fmt: skip

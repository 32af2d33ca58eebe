"""memory_report.html: the memory report as one page for people."""

from __future__ import annotations

from typing import Any


def render_html(report: dict[str, Any]) -> str:
    return ""

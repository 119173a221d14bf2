"""The check of a teacher's server as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from xtok.cli.tables._tables import STYLES, cell, new_table, printing

if TYPE_CHECKING:
    from xtok.teachers.serving.check import ServerReport

_NAMES = {"vllm": "vLLM", "sglang": "SGLang", None: "unknown"}
_CACHING = {True: "on", False: "off", None: "unknown"}


def print_server(report: ServerReport) -> None:
    """Print the facts about a server, and the change for each problem."""
    tokenizer = {"": "equal", None: "not compared"}.get(report.tokenizer_difference, "different")
    facts = [
        ("server", f"{_NAMES[report.kind]} {report.version or ''}".strip()),
        ("model", report.model),
        ("context", "unknown" if report.max_model_len is None else f"{report.max_model_len:,}"),
        ("candidates per token", str(report.candidates)),
        ("tokenizer", tokenizer),
        ("logprobs_mode", report.logprobs_mode or "unknown"),
        ("prefix caching", _CACHING[report.prefix_caching]),
    ]
    table = new_table("teacher's server", report.url, rows=facts)
    for finding in report.findings:
        level = "failed" if finding.is_fatal else "warning"
        words = cell(f"{finding.problem}; {finding.change}")
        table.add_row(Text(level, STYLES[level]), words)
    with printing() as console:
        console.print(table)

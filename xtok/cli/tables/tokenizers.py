"""Tables of `doctor`, `transplant` and `vocab`, at most 80 columns wide."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from xtok.cli.tables._tables import STYLES, cell, new_table, print_all, printing
from xtok.conversation.texts import short_text_notes
from xtok.tokenizers.display import percent, quoted, shorten

if TYPE_CHECKING:
    from xtok.inspection.doctor import Diagnosis, TokenizerDiagnosis
    from xtok.inspection.pair_facts import PairFacts, TextFacts
    from xtok.inspection.results import Check
    from xtok.inspection.vocab import VocabTable
    from xtok.teachers.serving.check import ServerReport
    from xtok.training.transplant import Transplant

_SERVERS = {"vllm": "vLLM", "sglang": "SGLang", None: "unknown"}
_CACHING = {True: "on", False: "off", None: "unknown"}


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Print the verdict, one table per tokenizer, and recommendations for a pair."""
    with printing() as console:
        console.print(cell(diagnosis.summary))
        for tokenizer in diagnosis.tokenizers:
            console.print(_checks(tokenizer))
        pair, advice = diagnosis.pair, diagnosis.advice
        if pair is not None:
            console.print(_pair(pair, diagnosis.pair_checks))
            if pair.text is not None:
                console.print(_on_text(pair.text))
        if advice is not None:
            for command in advice.commands:
                console.print(cell(f"next: {shlex.join(command)}"), soft_wrap=True)
            for other in advice.others:
                console.print(cell(f"also: {other}"))
        if diagnosis.failed:
            console.print(cell(f"failed: {'; '.join(diagnosis.failed)}"))


def _checks(tokenizer: TokenizerDiagnosis) -> Table:
    table = new_table(tokenizer.model_id, "", "finding")
    for name, checks in groupby(tokenizer.checks, key=attrgetter("name")):
        for index, check in enumerate(checks):
            level = Text(check.level, STYLES[check.level])
            table.add_row(cell("" if index else name), level, cell(check.message))
    return table


def _pair(pair: PairFacts, checks: Sequence[Check]) -> Table:
    share = f"{pair.shared:,} of the student's ids, {percent(pair.student_share)}; "
    share += f"{pair.vocabulary.both:,} different byte strings"
    ids = "each id is the same token on both sides"
    if pair.differing:
        ids = f"{pair.differing:,} differ: {', '.join(pair.differing_examples)}"
    is_one_family = pair.differing < pair.num_ids / 2
    numbers = pair.numbers
    teacher_numbers = f"{numbers.teacher:,}, {numbers.both:,} same"
    rows = [
        ("role in the map", "student (rows)", "teacher (columns)"),
        ("shared tokens", share),
        *([("ids", f"{ids}; {pair.num_ids:,} in all")] if is_one_family else []),
        ("numbers, 2+ ASCII digits", f"{numbers.student:,}", teacher_numbers),
        *([("spelled in the other's", *map(str, pair.spellings))] if pair.spellings else []),
        ("unmatched roles", ", ".join(pair.roles_alone) or "none"),
    ]
    table = new_table("a map between them", pair.student, pair.teacher, rows=rows)
    for check in checks:
        table.add_row(check.name, cell(check.message), Text(check.level, STYLES[check.level]))
    return table


def _on_text(text: TextFacts) -> Table:
    caption = (
        "uncertainty: conditional entropy of the other side's token at a shared boundary. No map "
        "in this direction has a lower cross-entropy. leak: share of boundaries with different "
        "events."
        + "".join(f" {note[:1].upper()}{note[1:]}." for note in short_text_notes(text.num_bytes))
    )
    forward, backward = text.conditional_entropy
    kept_bits = f"{percent(text.event_kept)} of the bits"
    rows = [
        ("shared boundaries", f"{text.boundaries:,}", f"{text.num_bytes:,} bytes"),
        ("tokens of both sides", *(f"{percent(x)} of the text" for x in text.partner_shares)),
        ("student → teacher", f"{forward:.2f} bits of uncertainty", ""),
        ("teacher → student", f"{backward:.2f} bits of uncertainty", ""),
        ("shared tokens as events", f"leak {percent(text.leak)}", f"{min(text.bits):.2f} bits"),
        ("events of bytes", f"leak {percent(text.event_leak)}", kept_bits),
    ]
    return new_table("on the text", "", "", rows=rows, caption=caption)


def print_server(report: ServerReport) -> None:
    """Print the facts about a server, and how to fix each problem."""
    tokenizer = {"": "equal", None: "not compared"}.get(report.tokenizer_difference, "different")
    facts = [
        ("server", f"{_SERVERS[report.kind]} {report.version or ''}".strip()),
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
    print_all([table])


def print_transplant(result: Transplant) -> None:
    """Print the number of new rows by origin, and the bits per byte of the old and new model."""
    counts = {
        "copied, tokens of both tokenizers": result.copied,
        "copied, special tokens by role": result.roles,
        "composed of other rows": result.composed,
        "mean row, tokens without pieces": result.empty,
        "mean row, padding": result.padding,
    }
    rows = [(label, f"{count:,}") for label, count in counts.items() if count]
    rows.append(("all rows", f"{result.vocab_size:,} (before: {result.old_vocab_size:,})"))
    if result.bits_before is not None and result.bits_after is not None:
        bits = f"{result.bits_after:.3f} (before: {result.bits_before:.3f})"
        rows.append(("bits per byte of text", bits))
    print_all([new_table("rows of the new model", "", rows=rows, right=(1,))])


def print_vocab(table: VocabTable, names: Callable[[int], str] | None = None) -> None:
    """Print tokens. `names` converts a teacher id to the token's name."""
    counts = ", ".join(f"{n:,} {kind.replace('_', ' ')}" for kind, n in table.types.items())
    heads = ["id", "bytes", "length", "type", "name", "roles"]
    rows = []
    for t in table.tokens:
        kind, roles = t.type.replace("_", " "), ", ".join(t.roles)
        row = [str(t.id), shorten(t.bytes), str(t.length), kind, quoted(t.name), roles]
        if names is not None:
            partner = "" if t.teacher_id is None else str(t.teacher_id)
            row += [partner, " ".join(map(names, (t.spelling or ())[:20]))]
        rows.append(row)
    if table.teacher is not None:
        heads += ["teacher id", "spelling"]
    caption = f"{table.model}: {table.vocab_size:,} ids: {counts}"
    caption += "" if table.teacher is None else f"; teacher: {table.teacher}"
    print_all([new_table(*heads, rows=rows, right=(0, 2, 6), caption=caption)])

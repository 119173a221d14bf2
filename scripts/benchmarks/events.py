"""Event maps: leak and bits on held-out text, and what `event_kl` costs."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator

import torch

import xtok
from benchmarks.harness import Row, chosen, race, tokenizer
from benchmarks.training import finish, make_alignment, peak_above
from xtok import EventMap, EventsConfig
from xtok.training.losses import event_index, event_kl

PAIRS = (
    ("llama3", "qwen"), ("mistral-v3", "qwen"), ("llama3", "mistral-v3"), ("llama3", "tekken"),
)  # fmt: skip
COUNTED = ("de", "en", "python", "zh")  # the other languages are not counted on
LEAKS = (0.02, 0.01, 0.005, 0.002, 0.001)


def events(options: Namespace) -> Iterator[Row]:
    """Make event maps of the bytes alone, and of text down to each leak; measure on other text."""
    if options.corpus is None:
        raise SystemExit("error: events needs --corpus")
    texts = [options.corpus / f"{language}.train.jsonl.gz" for language in COUNTED]
    held_out = sorted(options.corpus.glob("*.valid.jsonl.gz"))
    for label, (student, teacher) in chosen(PAIRS, options):
        sides = tokenizer(student), tokenizer(teacher)
        start = time.perf_counter()
        made = {"bytes": xtok.events(*sides)}
        taken = {"bytes": time.perf_counter() - start}
        for leak in LEAKS:
            start = time.perf_counter()
            made[f"text, {leak}"] = xtok.events(*sides, texts, EventsConfig(max_leak=leak))
            taken[f"text, {leak}"] = time.perf_counter() - start
        measured = xtok.evaluate(list(made.values()), held_out, *sides, names=list(made))
        for name, event_map in made.items():
            row: Row = {"pair": label, "events of": name, "events": event_map.num_events}
            row["s"] = taken[name]
            for m in measured.event_measures:
                if m.name == name:
                    row[m.group.partition(".")[0]] = f"{m.leak:.4f} / {m.kept:.3f}"
            yield row
        shared = {m.group.partition(".")[0]: m.shared_leak for m in measured.event_measures}
        words = {group: f"{leak:.4f}" for group, leak in shared.items()}
        yield {"pair": label, "events of": "shared vocabulary", **words}


def event_kl_cost(options: Namespace) -> Iterator[Row]:
    """Forward and backward beside the plain KL of two models of the wider vocabulary."""
    device = options.device
    positions = max(16, int(256 * options.size))
    for label, (student, teacher) in chosen(PAIRS[:2], options):
        made = xtok.events(tokenizer(student), tokenizer(teacher))
        yield event_kl_row(label, made, positions, device, options.repeat)


def event_kl_row(label: str, made: EventMap, positions: int, device: str, repeat: int) -> Row:
    """Race `event_kl` against `kl_div` of log-softmaxes; memory is the peak above the logits."""
    torch.manual_seed(0)
    index = event_index(made).to(device)
    ours_in, theirs_in = (torch.randn(1, positions, n, device=device) for n in made.shape)
    plain_in, plain_teacher = (
        torch.randn(1, positions, max(made.shape), device=device) for _ in range(2)
    )
    for logits in (ours_in, plain_in):
        logits.requires_grad_()
    alignment = make_alignment(positions, device)

    def ours() -> None:
        ours_in.grad = None
        event_kl(ours_in, theirs_in, index, alignment).backward()
        finish(device)

    def plain() -> None:
        plain_in.grad = None
        log_p, log_q = (torch.log_softmax(x[0], -1) for x in (plain_in, plain_teacher))
        kl = torch.nn.functional.kl_div(log_p, log_q, reduction="batchmean", log_target=True)
        kl.backward()
        finish(device)

    peaks = [peak_above(call, device) / 2**20 for call in (ours, plain)]
    return {
        "pair": label, "positions": positions, "events": made.num_events,
        **race(ours, plain, repeat).row(1.5), "held MiB": peaks[0], "plain MiB": peaks[1],
        "ratio of memory": peaks[0] / max(peaks[1], 1e-9),
    }  # fmt: skip

"""Errors of the option for a loss: causes, messages and hints."""

from __future__ import annotations

from error_causes import Errors, messages_test

from xtok.cli.options import read_loss
from xtok.loss_names import EventLoss

ERRORS: Errors = {
    "xtok events STUDENT TEACHER": [
        (lambda: read_loss("event-kl"), "event-kl does not use a projection map"),
    ],
    "xtok events STUDENT TEACHER --for csd": [
        (lambda: read_loss("csd"), "csd does not use a projection map"),
    ],
    "train without a file: the teacher's log-probabilities suffice": [
        (lambda: read_loss("alm"), "alm does not use a projection map"),
    ],
    "xtok project TOPK STUDENT TEACHER -o OUTPUT.parquet": [
        (lambda: read_loss("topk-kl"), "topk-kl does not use a projection map"),
    ],
    "xtok build STUDENT TEACHER --for p-kl": [
        (lambda: read_loss("p_kl", EventLoss), "p-kl does not use an event map"),
    ],
}

test_loss_errors = messages_test(ERRORS)

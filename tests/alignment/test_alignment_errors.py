"""Errors of alignments: causes, messages and hints."""

from __future__ import annotations

from error_causes import Errors, bytes_pair, messages_test

import xtok

ERRORS: Errors = {
    "score the text that the student wrote, or skip differences with partial=True": [
        (
            lambda: xtok.project_logprobs(
                xtok.TokenAligner(bytes_pair()), [*b"12"], [*b"7"], [-1.0]
            ),
            'the texts differ at byte 0, after "": the student has "12", the teacher has "7"',
        ),
    ],
    "use a teacher with byte tokens or a byte-level tokenizer": [
        (
            lambda: xtok.Retokenizer(xtok.load_pair("bytes", "null:5"))([[*b"The keeper"]]),
            "null:5 cannot spell 'The keeper', which is in the student's text",
        ),
    ],
}

test_alignment_errors = messages_test(ERRORS)

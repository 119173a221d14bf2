"""Match tokens that differ only in line breaks or in a space before punctuation."""

from __future__ import annotations

import re
from unicodedata import category

from xtok.tokenizers.table import TokenTable

_LINE_BREAK = re.compile("\r\n|[\r\x85\u2028\u2029]")


def relaxed_form(token: bytes) -> bytes:
    r"""Return the form that a token shares with its near-equivalent tokens.

    Line breaks become `\n`, and a single space before punctuation or a line break is removed.
    X-Token uses the same form (arXiv 2605.21699, and `canonical_token` in NeMo-RL).

    >>> relaxed_form(b" ,"), relaxed_form(b"\r\n\r\n"), relaxed_form(b" the")
    (b',', b'\n\n', b' the')
    """
    if not (token[:1] == b" " or b"\r" in token or b"\xc2\x85" in token or b"\xe2\x80" in token):
        return token
    try:
        text = _LINE_BREAK.sub("\n", token.decode())
    except UnicodeDecodeError:
        return token
    rest = text[1:]
    if text[0] == " " and rest and all(c == "\n" or category(c)[0] in "PS" for c in rest):
        text = rest
    return text.encode()


def match_relaxed(student: TokenTable, teacher: TokenTable) -> dict[int, int]:
    """Pair student ids that have no equal teacher token with near-equivalent teacher ids.

    The near-equivalent token is the relaxed form of the student's token. If the teacher has no
    token with the relaxed form, the near-equivalent is a space and the relaxed form.
    """
    teacher_ids = teacher.canonical_ids()
    pairs: dict[int, int] = {}
    for s, token in enumerate(student.tokens()):
        if token and token not in teacher_ids:
            form = relaxed_form(token)
            spaced = b" " + form
            if form in teacher_ids:
                pairs[s] = teacher_ids[form]
            elif spaced in teacher_ids and relaxed_form(spaced) == form:
                pairs[s] = teacher_ids[spaced]
    return pairs

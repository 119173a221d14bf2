"""Alignment of one text."""

from __future__ import annotations

from xtok.alignment.aligner import TextAlignment, TokenAligner, describe_alignment
from xtok.tokenizers import ModelLike, load_pair
from xtok.tokenizers.table import utf8_text


def align(
    student_model: ModelLike,
    teacher_model: ModelLike,
    text: str | bytes,
    *,
    max_comb_len: int = 4,
) -> TextAlignment:
    r"""Tokenize one text like both models, and align the tokens.

    Invalid UTF-8 is spelled by bytes, as in the middle of a longer text.

    >>> xtok.align("bytes", "bytes", "né").student_tokens
    ('n', '\\xc3', '\\xa9')

    Raises:
        TokenizerError: if a vocabulary cannot spell the text.
    """
    pair = load_pair(student_model, teacher_model)
    aligner = TokenAligner(pair, max_comb_len)
    if isinstance(text, bytes):
        decoded = utf8_text(text)
        if decoded is None:
            ids = (tokenizer.segment(text) for tokenizer in pair.tokenizers)
            return describe_alignment(aligner, pair, *ids)
        text = decoded
    ours, theirs = (tokenizer.encode(text) for tokenizer in pair.tokenizers)
    alignment = None
    if aligner.prefers_spans(ours.ids, theirs.ids):
        alignment = aligner.align_spans(ours[:2], theirs[:2])
    rows = ours.ids.tolist(), theirs.ids.tolist()
    return describe_alignment(aligner, pair, *rows, alignment=alignment)

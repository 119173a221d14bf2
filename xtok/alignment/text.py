"""Align one text, as both models tokenize it."""

from __future__ import annotations

from xtok.alignment.aligner import TextAlignment, TokenAligner, describe_alignment
from xtok.tokenizers import ModelLike, Tokenizer
from xtok.tokenizers import pair as pair_of


def align(
    student_model: ModelLike,
    teacher_model: ModelLike,
    text: str | bytes,
    *,
    max_comb_len: int = 4,
) -> TextAlignment:
    r"""Tokenize one text as both models read it, and align it.

    Bytes that are no UTF-8 are spelled byte for byte, as in the middle of a longer text.

    >>> xtok.align("bytes", "bytes", "né").student_tokens
    ('n', '\\xc3', '\\xa9')

    Raises:
        TokenizerError: if a vocabulary cannot spell the text.
    """
    pair = pair_of(student_model, teacher_model)
    aligner = TokenAligner(pair, max_comb_len)
    return describe_alignment(aligner, pair, *(_ids(side, text) for side in pair.tokenizers))


def _ids(tokenizer: Tokenizer, text: str | bytes) -> list[int]:
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError:
            return tokenizer.segment(text)
    return tokenizer.encode_batch([text])[0]

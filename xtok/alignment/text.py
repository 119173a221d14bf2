"""Tokenize and align one text or conversation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xtok._lib.progress import Note, silent_note
from xtok.alignment.aligner import TextAlignment, TokenAligner, describe_alignment
from xtok.config import ChatTemplates
from xtok.tokenizers import ModelLike, load_pair
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import utf8_text

if TYPE_CHECKING:
    from xtok.alignment.chats import ChatLike


def align(
    student_model: ModelLike | Pair,
    teacher_model: ModelLike | None = None,
    text: str | bytes | None = None,
    *,
    chat: ChatLike | None = None,
    templates: ChatTemplates | None = None,
    max_comb_len: int = 4,
    note: Note = silent_note,
) -> TextAlignment:
    r"""Tokenize a text or a conversation with both tokenizers, and align the tokens.

    >>> xtok.align("bytes", "bytes", "né").student_tokens
    ('n', '\\xc3', '\\xa9')

    Args:
        student_model: the student, or a `Pair` with both models.
        teacher_model: the teacher.
        text: a text. Bytes that are not valid UTF-8 are split into tokens as a part of a longer
            text, without the normalizer.
        chat: a list of messages, a row with `messages`, or the path of a file with one conversation
            (see `read_conversations`). The conversation is rendered with the student's and with the
            teacher's chat template.
        templates: chat templates that replace the templates of the tokenizers.
        max_comb_len: see `TokenAligner`.
        note: called with each note about the conversation.

    Raises:
        TokenizerError: if a vocabulary cannot spell the text.
        XtokError: if the conversation cannot be read or rendered.
        ValueError: if `text` and `chat` are both given or both missing, or if templates are given
            with a text.
    """
    pair = load_pair(student_model, teacher_model)
    aligner = TokenAligner(pair, max_comb_len)
    if text is not None and chat is None:
        if templates is not None:
            raise ValueError("templates apply only to a conversation; pass chat= instead of text")
        return _aligned_text(aligner, pair, text)
    if chat is None or text is not None:
        raise ValueError("pass either a text or a conversation")
    from xtok.alignment.chats import describe_chat  # only conversations need this module

    return describe_chat(aligner, pair, chat, templates, note)


def _aligned_text(aligner: TokenAligner, pair: Pair, text: str | bytes) -> TextAlignment:
    if isinstance(text, bytes):
        decoded = utf8_text(text)
        if decoded is None:
            ids = (tokenizer.segment(text) for tokenizer in pair.tokenizers)
            return describe_alignment(aligner, pair, *ids)
        text = decoded
    student, teacher = (tokenizer.encode(text) for tokenizer in pair.tokenizers)
    alignment = None
    if aligner.prefers_spans(student.ids, teacher.ids):
        alignment = aligner.align_spans(student[:2], teacher[:2])
    rows = student.ids.tolist(), teacher.ids.tolist()
    return describe_alignment(aligner, pair, *rows, alignment=alignment)

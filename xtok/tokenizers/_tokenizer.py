"""The `Tokenizer` that the rest of xtok sees: exact bytes, exact spelling, the library's ids."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok.config import TokenForm
from xtok.errors import TokenizerError
from xtok.tokenizers._backend import Backend, TextChange, no_panic, splitting_at
from xtok.vocab.roles import find_roles
from xtok.vocab.table import MAX_WIDTH, TokenTable, TokenType, Vocabulary, decode_vocabulary


class Encoding(NamedTuple):
    """A text as ids, and where each one is in it.

    `ids` is int32 `[T]`; token i is bytes `bounds[i]` to `bounds[i + 1]` of the text in UTF-8,
    int64 `[T + 1]`. A token has none where its library put a space before the text. `num_changed`
    bytes are of stretches that the library changed before it encoded them.
    """

    ids: NDArray[np.int32]
    bounds: NDArray[np.int64]
    num_changed: int


class Tokenizer:
    """A loaded tokenizer: its vocabulary as exact bytes, and the exact spelling of any bytes.

    `vocabulary` has the token `table` and where it comes from, `report` how the ids became the
    table, `location` the folder or file (a `Path`) or the repo (a `str`) that it was loaded from,
    `notes` what its user should know about how it was loaded.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        model_id: str,
        location: str | Path | None = None,
        revision: str | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.location = location
        self.notes = backend.notes
        self._backend = backend
        entries = list(backend.entries())
        largest = max((entry.id for entry in entries), default=-1)
        width, source = _width(backend, model_id, vocab_size, largest, len(entries))
        table, self.report = decode_vocabulary(entries, width=width)
        self.table = replace(table, roles=find_roles(table, backend.declared_roles()))
        self.vocabulary = Vocabulary(
            model_id=model_id,
            revision=revision,
            backend=backend.name,
            vocab_size=width,
            width_source=source,
            tokenizer_vocab_size=largest + 1,
            table=self.table,
        )
        self._tokens = self.table.tokens()
        preferred = self._emitted_duplicates()
        if preferred:
            self.table = replace(self.table, preferred_ids=preferred)
            self.vocabulary = replace(self.vocabulary, table=self.table)

    def __repr__(self) -> str:
        vocabulary = self.vocabulary
        num_ids = vocabulary.vocab_size
        return f"Tokenizer({vocabulary.model_id!r}, {vocabulary.backend}, {num_ids} ids)"

    def table_as(self, form: TokenForm, *, ignore: Collection[int] = ()) -> TokenTable:
        """Return the table in a form of `decode_vocabulary`, with some ids taken for UNUSED."""
        if form == "bytes" and not ignore:
            return self.table
        table, _ = decode_vocabulary(
            self._backend.entries(), width=len(self.table), form=form, ignore=frozenset(ignore)
        )
        return table.like(self.table)

    def segment(self, token: bytes | str) -> list[int]:
        """Spell a token's bytes, or any others, byte for byte, as in the middle of a text.

        The tokens' bytes concatenate to exactly these. Valid UTF-8 goes through the library's own
        encoder. What does not round-trip there, and partial UTF-8, goes through the model's own
        merges on bytes, then the byte tokens, then greedy longest match. For a text that a model
        reads, use `encode`: a normalizer changes what this does not.

        Raises:
            TokenizerError: if the vocabulary cannot spell these bytes.
        """
        data = token.encode() if isinstance(token, str) else token
        [ids] = self.segment_batch([data])
        if ids is None:
            raise TokenizerError(
                f"{self.vocabulary.model_id} cannot spell the bytes {data[:40]!r}",
                hint="use a tokenizer with byte tokens or a byte-level vocabulary",
            )
        return ids

    def segment_batch(self, pieces: Sequence[bytes]) -> list[list[int] | None]:
        """Segment many byte strings at once; None where the vocabulary cannot spell one."""
        result: list[list[int] | None] = [None] * len(pieces)
        ways: tuple[Callable[[list[bytes]], Iterable[list[int] | None]], ...] = (
            self._by_library,
            lambda batch: map(self._backend.encode_bytes, batch),
            self._by_byte_tokens,
            lambda batch: map(self._longest_match, batch),
        )
        rest = list(range(len(pieces)))
        with no_panic(self.vocabulary.model_id):
            for way in ways:
                for row, ids in zip(rest, way([pieces[row] for row in rest]), strict=True):
                    if ids is not None and self._spells(ids, pieces[row]):
                        result[row] = ids
                rest = [row for row in rest if result[row] is None]
                if not rest:
                    break
        return result

    def encode(self, text: str) -> Encoding:
        """Encode a text that a model reads, exactly as the model's own library does.

        Its normalizer, its prefix and its control tokens are included; nothing is added around the
        text. Where a library recognises no control tokens (SentencePiece, tiktoken and tekken
        files), they are found by their names, and what is between them is encoded.

        Raises:
            TokenizerError: if the library refuses the text.
        """
        [ids] = self.encode_batch([text])
        bounds, num_changed = _Bounds(self, text, ids).find()
        return Encoding(np.array(ids, np.int32), np.array(bounds, np.int64), num_changed)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids that `encode` gives, of many texts at once.

        Raises:
            TokenizerError: if the library refuses a text.
        """
        with no_panic(self.vocabulary.model_id):
            rows = self._backend.encode_whole(texts)
            return [self._by_stretches(text) for text in texts] if rows is None else rows

    def _by_stretches(self, text: str) -> list[int]:
        start, *parts = self._control_pattern.split(text)
        ids = self._backend.encode_start(start) if start else []
        between = iter(self._backend.encode_texts(parts[1::2]))
        for name in parts[::2]:
            ids += [self._control_ids[name], *next(between)]
        return ids

    def _spans(self, text: str) -> list[tuple[int, int]]:
        """Return where the library says that each token of a whole text is, in bytes."""
        with no_panic(self.vocabulary.model_id):
            if self._backend.encode_whole([""]) is not None:
                return list(self._backend.spans(text))
            spans: list[tuple[int, int]] = []
            begin = 0
            for place, part in enumerate(self._control_pattern.split(text)):
                size = len(part.encode())
                inner = self._backend.spans(part, at_start=not place) if part else ()
                inner = [(0, size)] if place % 2 else inner
                spans += [(begin + start, begin + end) for start, end in inner]
                begin += size
            return spans

    def library_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return what the library gives for stretches from the middle of a text, changed or not.

        Control tokens in them are plain text; `encode` is for texts that a model reads.
        """
        with no_panic(self.vocabulary.model_id):
            return self._backend.encode_texts(texts)

    def library_arrays(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return what `library_ids` does, as int32 arrays."""
        with no_panic(self.vocabulary.model_id):
            return self._backend.encode_arrays(texts)

    # Kept, because a backend may read files, and ask the hub for those that are missing.

    @functools.cached_property
    def special_token_names(self) -> Mapping[str, str]:
        """The names of the special tokens by `bos_token` and the like, as chat templates use."""
        names = {}
        for role, ids in self._backend.declared_roles().items():
            for i in ids[:1]:
                name = self._control_names.get(i) or self.table[i]
                names[f"{role}_token"] = name.decode("utf-8", "replace")
        return names

    @functools.cached_property
    def chat_templates(self) -> Mapping[str, str]:
        """The Jinja chat templates that the tokenizer brings, by name."""
        return self._backend.chat_templates()

    @property
    def text_changes(self) -> Sequence[TextChange]:
        """What keeps a text from being the concatenation of its tokens' bytes; mostly nothing."""
        return self._backend.text_changes()

    @functools.cached_property
    def _control_names(self) -> dict[int, bytes]:
        return {i: name.encode() for i, name in self.table.control_names.items() if name}

    @functools.cached_property
    def _control_ids(self) -> dict[str, int]:
        ids = self.table.ids_of_type(TokenType.CONTROL).tolist()
        return {name: i for i in reversed(ids) if (name := self.table.control_names[i])}

    @functools.cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        return splitting_at(self._control_ids)

    def _spells(self, ids: Sequence[int], data: bytes) -> bool:
        """Tell whether all ids are text and their bytes concatenate to `data`."""
        tokens = self._tokens
        try:
            parts = [tokens[i] for i in ids]
        except IndexError:  # an id that the vocabulary lacks
            return False
        return b"" not in parts and b"".join(parts) == data

    def _by_library(self, pieces: Sequence[bytes]) -> list[list[int] | None]:
        """Encode what is valid UTF-8 in the library's own way."""
        texts = [piece.decode("utf-8", "surrogateescape") for piece in pieces]
        rows = [row for row, text in enumerate(texts) if not _INVALID.search(text)]
        result: list[list[int] | None] = [None] * len(pieces)
        for row, ids in zip(rows, self.library_ids([texts[row] for row in rows]), strict=True):
            result[row] = ids
        return result

    def _by_byte_tokens(self, pieces: Sequence[bytes]) -> list[list[int] | None]:
        """Encode the runs of valid UTF-8 as text, and spell each byte between as a BYTE token."""
        runs_of = [_INVALID.split(piece.decode("utf-8", "surrogateescape")) for piece in pieces]
        texts = sorted({text for runs in runs_of for text in runs[::2]})
        ids_of = dict(zip(texts, self.library_ids(texts), strict=True))
        for i in self.table.ids_of_type(TokenType.BYTE).tolist():
            if self.table[i] >= b"\x80":
                ids_of[self.table[i].decode("ascii", "surrogateescape")] = [i]
        return [
            [i for run in runs for i in ids_of[run]] if ids_of.keys() >= set(runs) else None
            for runs in runs_of
        ]

    def _longest_match(self, data: bytes) -> list[int] | None:
        """Take the longest token at each place; linear for the few token lengths that occur."""
        known = self.table.canonical_ids()
        ids: list[int] = []
        start = 0
        while start < len(data):
            for length in self._token_lengths:
                token = data[start : start + length]
                if token in known:
                    ids.append(known[token])
                    start += len(token)
                    break
            else:
                return None
        return ids

    @functools.cached_property
    def _token_lengths(self) -> list[int]:
        lengths: list[int] = np.unique(self.table.lengths[self.table.text_ids]).tolist()
        return lengths[::-1]

    def _emitted_duplicates(self) -> tuple[int, ...]:
        """Return the ids emitted for bytes of several ids, where `canonical_ids` has another."""
        known = self.table.canonical_ids()
        if self.report.num_text == len(known):
            return ()
        count = Counter(filter(None, self.table.tokens()))
        shared = [token for token, n in count.items() if n > 1]
        emitted = zip(shared, self.segment_batch(shared), strict=True)
        return tuple(sorted(
            ids[0] for token, ids in emitted if ids and len(ids) == 1 and ids[0] != known[token]
        ))  # fmt: skip


_INVALID = re.compile("([\udc80-\udcff])")  # a byte that is not UTF-8, by `surrogateescape`

# Widths up to here are cheap, however few the tokens; the widest of models in use is 262,208.
_MANY_IDS = 1 << 20


def _skip_whitespace(data: bytes, place: int) -> int:
    while data[place : place + 1].isspace():
        place += 1
    return place


class _Bounds:
    """Where each token of a text begins.

    A library may put a space before a stretch of text, and may have a control token take the
    whitespace beside it. Anything else that differs from the text was changed by the library: it
    reaches to the next token that is at its place by the library's own offsets.
    """

    def __init__(self, tokenizer: Tokenizer, text: str, ids: Sequence[int]) -> None:
        names, tokens = tokenizer._control_names, tokenizer._tokens
        self._data = text.encode()
        self._is_control = [i in names for i in ids]
        self._tokens = [names.get(i) or (tokens[i] if i < len(tokens) else b"") for i in ids]
        self._ask = functools.partial(tokenizer._spans, text)

    def find(self) -> tuple[list[int], int]:
        """Return the bounds, and how many bytes are in stretches that were changed."""
        if b"".join(self._tokens) == self._data:
            return [0, *accumulate(map(len, self._tokens))], 0
        starts: list[int] = []
        place = num_changed = 0
        while len(starts) < len(self._tokens):
            if (exact := self._exact(len(starts), place)) is not None:
                starts.append(exact[0])
                place = exact[1]
                continue
            behind, end = self._next_exact(len(starts), place)
            num_changed += end - place
            starts += self._within(len(starts), behind, place, end)
            place = end
        if self._is_control[-1:] == [True]:
            place = _skip_whitespace(self._data, place)
        starts[:1] = [0] * len(starts[:1])
        return [*starts, len(self._data)], num_changed + len(self._data) - place

    def _exact(self, i: int, place: int) -> tuple[int, int] | None:
        """Return where token i begins and ends, behind the others; None if it is not there."""
        token, data = self._tokens[i], self._data
        after_control = i == 0 or self._is_control[i - 1]
        if not token:
            return None
        if data.startswith(token, place):
            return place, place + len(token)
        stripped = _skip_whitespace(data, place)
        if (self._is_control[i] or after_control) and data.startswith(token, stripped):
            # Whitespace is the control token's, the one before or this one.
            return stripped if after_control else place, stripped + len(token)
        if after_control and token[:1] == b" " and data.startswith(token[1:], place):
            return place, place - 1 + len(token)
        return None

    def _next_exact(self, first: int, place: int) -> tuple[int, int]:
        """Return the next token that is in the text as it is, and its place; or the text's end."""
        for i in range(first, len(self._tokens)):
            token, start = self._tokens[i], self._spans[i][0]
            spaces = len(token) - len(token.lstrip())  # some libraries leave them out of a span
            for begin in (start, start - spaces):
                is_behind = begin > place if i == first else begin >= place
                if token and is_behind and self._data.startswith(token, begin):
                    return i, begin
        return len(self._tokens), len(self._data)

    def _within(self, first: int, behind: int, place: int, end: int) -> Iterator[int]:
        """Return where the tokens of a changed stretch begin, by the library's spans."""
        begins = Counter(min(max(self._spans[i][0], place), end) for i in range(first, behind))
        bounds = [place, *sorted(begins)[1:], end]
        for count, (begin, stop) in zip(
            (begins[begin] for begin in sorted(begins)), pairwise(bounds), strict=False
        ):
            # Tokens of one character share its bytes, so that the first and the last have some.
            places = begin + np.arange(count) * (stop - begin) // count
            places[1:] = places[1:].clip(begin + 1, max(stop - 1, begin))
            yield from places.tolist()

    @functools.cached_property
    def _spans(self) -> list[tuple[int, int]]:
        spans, missing = self._ask(), (len(self._data), len(self._data))
        return spans + [missing] * (len(self._tokens) - len(spans))


def _width(
    backend: Backend, model_id: str, vocab_size: int | None, largest: int, num_tokens: int
) -> tuple[int, str]:
    """Return the model's width and its source: an option, else the config, else the tokenizer."""
    width, source, says = vocab_size, "option", "as given"
    if width is None:
        width, source, says = backend.model_vocab_size(), "config", "from its config"
    if width is None:
        width, source, says = largest + 1, "tokenizer", "its largest token id + 1"
    problem = f"the vocabulary size {width} of {model_id} ({says})"
    hint = "give the width of the model's logits with {option}"
    if width <= largest:
        problem += f" does not hold its largest token id {largest}"
        hint = f"give the width of the model's logits, at least {largest + 1}, with {{option}}"
    elif source != "option" and width > max(_MANY_IDS, 4 * num_tokens):
        problem = f"{model_id} has {num_tokens} tokens, and a vocabulary size of {width} ({says})"
        hint = "its files may be damaged; if the model is as wide as that, give {option}"
    elif not 0 < width <= MAX_WIDTH:
        problem += f" is not in 1..{MAX_WIDTH}"
    else:
        return width, source
    raise TokenizerError(problem, hint=hint, parameter="vocab_size")

"""The `Tokenizer` that the rest of xtok sees: exact bytes, exact spelling, the library's ids."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok.config import TokenForm
from xtok.errors import TokenizerError
from xtok.tokenizers._backend import (
    GENERATION_CONFIG,
    Backend,
    Roles,
    TextChange,
    eos_ids,
    model_vocab_size,
    no_panic,
    splitting_at,
)
from xtok.tokenizers.display import escape, listed, plural, quoted
from xtok.tokenizers.hub import ModelFiles
from xtok.tokenizers.roles import find_roles
from xtok.tokenizers.sides import MAX_WIDTH
from xtok.tokenizers.table import (
    Decoded,
    TokenTable,
    TokenType,
    Vocabulary,
    decode_vocabulary,
    utf8_runs,
    utf8_text,
)


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

    `vocabulary` has the token `table` and where it comes from, `undecodable` the text ids of it
    without bytes, `location` is the folder or file (a `Path`) or the repo (a `str`) behind it,
    `notes` what its user should know about how it was loaded.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        model_id: str,
        files: ModelFiles | None = None,
        location: str | Path | None = None,
        revision: str | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.location = location
        self._backend, self._files = backend, files
        decoded = Decoded(backend.entries())
        largest = max(decoded.ids, default=-1)
        width, source = _width(files, model_id, vocab_size, largest, len(decoded.ids))
        self._without_row = decoded.cut(width)
        largest = max(decoded.ids, default=-1)
        self.undecodable = decoded.undecodable
        table = decoded.table(width)
        del decoded  # its memory serves the tokens of the table
        self.table = replace(table, roles=find_roles(table, self.declared))
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
        self.notes = (
            *backend.notes,
            *self._notes_on_width(),
            *(files.notes if files else ()),
        )

    def _notes_on_width(self) -> Iterator[str]:
        """Name the tokens that the model has no row for, and a config without a width."""
        known = self.vocabulary
        if known.width_source == "tokenizer" and self._files and self._files.find("config.json"):
            yield (
                f"the config.json of {known.model_id} has no vocabulary size: its width is that of "
                f"the tokenizer, {known.vocab_size:,}, and the model's logits may be wider"
            )
        if self._without_row:
            tokens = [*map(self._shown_without_row, self._without_row)]
            yield (
                f"{self.vocabulary.model_id} is a model of {self.vocabulary.vocab_size:,} ids, "
                f"without a row for {plural(len(tokens), 'token')} of its tokenizer, which "
                f"{'is' if len(tokens) == 1 else 'are'} left out: {listed(tokens)}"
            )

    def _shown_without_row(self, token_id: int) -> str:
        return f"{quoted(escape(self._without_row[token_id]))} (id {token_id:,})"

    def __repr__(self) -> str:
        vocabulary = self.vocabulary
        num_ids = vocabulary.vocab_size
        return f"Tokenizer({vocabulary.model_id!r}, {vocabulary.backend}, {num_ids} ids)"

    def at_width(self, vocab_size: int) -> Tokenizer:
        """Return the tokenizer with the width of another model's logits.

        Raises:
            TokenizerError: if it does not hold most of its ids.
        """
        known = self.vocabulary
        largest = (known.tokenizer_vocab_size or 0) - 1
        if self._without_row or vocab_size <= largest:
            return Tokenizer(
                self._backend,
                model_id=known.model_id,
                files=self._files,
                location=self.location,
                revision=known.revision,
                vocab_size=vocab_size,
            )
        width, source = _width(None, known.model_id, vocab_size, largest, len(self.table))
        changed = copy.copy(self)
        changed.table = self.table.at_width(width)
        changed.vocabulary = replace(
            known, vocab_size=width, width_source=source, table=changed.table
        )
        changed._tokens = changed.table.tokens()
        return changed

    def read_otherwise(self) -> tuple[str, Tokenizer] | None:
        """Return what else reads the same folder, by name; None if there is nothing to compare.

        It is the folder's file alone, where Transformers decides what it means; or AutoTokenizer,
        where the file is read by a library of another kind.

        Raises:
            TokenizerError: if that cannot read it.
        """
        if self._backend.other is None:
            return None
        name, load = self._backend.other
        return name, Tokenizer(load(), model_id=self.vocabulary.model_id)

    def table_as(self, form: TokenForm, *, ignore: Collection[int] = ()) -> TokenTable:
        """Return the table in a form of `decode_vocabulary`, with some ids taken for UNUSED."""
        if form == "bytes" and not ignore:
            return self.table
        ignored = frozenset((*ignore, *self._without_row))
        table, _ = decode_vocabulary(
            self._backend.entries(), width=len(self.table), form=form, ignore=ignored
        )
        return table.like(self.table)

    def segment(self, token: bytes | str) -> list[int]:
        """Spell a token's bytes, or any others, byte for byte, as in the middle of a text.

        The tokens' bytes concatenate to exactly these bytes. The library's own encoder spells valid
        UTF-8. For other bytes, and if the encoder does not round-trip, it tries the model's merges
        on bytes, then the byte tokens, then a greedy longest match. For the input of a model, use
        `encode`, which also applies the normalizer.

        >>> xtok.load_tokenizer("bytes").segment("né")
        [110, 195, 169]

        Raises:
            TokenizerError: if the vocabulary cannot spell these bytes.
        """
        if isinstance(token, str):
            _require_utf8([token])
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

        >>> xtok.load_tokenizer("bytes").encode("né").bounds.tolist()
        [0, 1, 2, 3]

        Raises:
            TokenizerError: if the library refuses the text, or it has half of a surrogate pair.
        """
        [ids] = self.encode_batch([text])
        data, names, tokens = text.encode(), self._control_names, self._tokens
        spelled = [names.get(i) or (tokens[i] if i < len(tokens) else b"") for i in ids]
        if b"".join(spelled) == data:
            bounds, num_changed = [0, *accumulate(map(len, spelled))], 0
        else:
            bounds, num_changed = _bounds(spelled, data, self._spans(text))
        return Encoding(np.array(ids, np.int32), np.array(bounds, np.int64), num_changed)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids that `encode` gives, of many texts at once.

        Raises:
            TokenizerError: if the library refuses a text, one has half of a surrogate pair, or the
                library gives a token that the model has no row for.
        """
        _require_utf8(texts)
        with no_panic(self.vocabulary.model_id):
            rows = self._backend.encode_whole(texts)
            if rows is None:
                rows = [self._by_stretches(text) for text in texts]
        if self._without_row:
            self._check_rows(texts, rows)
        return rows

    def _check_rows(self, texts: Sequence[str], rows: Iterable[Sequence[int]]) -> None:
        for text, ids in zip(texts, rows, strict=True):
            for i in ids:
                if i in self._without_row:
                    raise TokenizerError(
                        f"the text {text[:40]!r} has the token {self._shown_without_row(i)}, but "
                        f"{self.vocabulary.model_id} has only {self.vocabulary.vocab_size:,} rows",
                        hint="remove the token from the text: the model has no row for it",
                    )

    def _by_stretches(self, text: str) -> list[int]:
        start, *parts = self._added_pattern.split(text)
        ids = self._backend.encode_start(start) if start else []
        between = iter(self._backend.encode_texts(parts[1::2]))
        for name in parts[::2]:
            ids += [self._added_ids[name], *next(between)]
        return ids

    def _spans(self, text: str) -> list[tuple[int, int]]:
        """Return where each token of a whole text is by the library, in bytes."""
        with no_panic(self.vocabulary.model_id):
            if self._backend.encode_whole([""]) is not None:
                return list(self._backend.spans(text))
            spans: list[tuple[int, int]] = []
            begin = 0
            for place, part in enumerate(self._added_pattern.split(text)):
                size = len(part.encode())
                inner = self._backend.spans(part, at_start=not place) if part else ()
                inner = [(0, size)] if place % 2 else inner
                spans += [(begin + start, begin + end) for start, end in inner]
                begin += size
            return spans

    def library_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return what the library gives for stretches from the middle of a text, changed or not.

        Control tokens in them are plain text; `encode` is for texts that a model reads. A token
        that the model has no row for is spelled with others.

        Raises:
            TokenizerError: if a text has half of a surrogate pair.
        """
        _require_utf8(texts)
        with no_panic(self.vocabulary.model_id):
            rows = self._backend.encode_texts(texts)
        return [self._respelled(ids) for ids in rows] if self._without_row else rows

    def library_arrays(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return what `library_ids` does, as int32 arrays."""
        _require_utf8(texts)
        with no_panic(self.vocabulary.model_id):
            rows = self._backend.encode_arrays(texts)
        if self._without_row:
            rows = [np.array(self._respelled(ids.tolist()), np.int32) for ids in rows]
        return rows

    def _respelled(self, ids: list[int]) -> list[int]:
        """Spell tokens that the model has no row for with others; as nothing, if that cannot be."""
        if self._without_row.keys().isdisjoint(ids):
            return ids
        tokens = self._without_row
        parts = [(self._longest_match(tokens[i]) or []) if i in tokens else [i] for i in ids]
        return [i for part in parts for i in part]

    # Kept, because a backend may read files, and ask the hub for those that are missing.

    @functools.cached_property
    def declared(self) -> Roles:
        """The bos, eos, pad, unk, cls, sep and mask that its library declares, each with where.

        Each role has its ids, the tokenizer's own before the other eos of `generation_config.json`.
        One that is declared as none has no ids; one that nobody declares is not in it.
        """
        roles = dict(self._backend.declared_roles())
        if more := eos_ids(self._files) if self._files else []:
            own = roles.get("eos", {})
            more = [i for i in more if i not in own]
            roles["eos"] = {**own, **dict.fromkeys(more, GENERATION_CONFIG)}
        return roles

    @functools.cached_property
    def library(self) -> Any:
        """The tokenizer that Transformers makes of the same folder; None where it makes none."""
        with suppress(TokenizerError):
            return self._backend.library()
        return None

    @functools.cached_property
    def bos_id(self) -> int | None:
        """The BOS token that the model's library begins a text with; None if it begins with none.

        Files of SentencePiece, tiktoken and tekken do not declare it: also None.
        """
        with no_panic(self.vocabulary.model_id):
            first = self._backend.ids_before()[:1]
        return next((i for i in first if i in self.declared.get("bos", ())), None)

    @functools.cached_property
    def definition_sha256(self) -> str:
        """A digest of everything that determines the ids of a text, and the special ids.

        It is independent of the order of JSON keys in a file. It depends on every merge, flag,
        normalizer and split pattern.
        """
        roles = {role: list(ids) for role, ids in self.declared.items()}
        known = [self.vocabulary.backend, self.table.sha256(), roles]
        digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode())
        for part in self._backend.definition():
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()

    @functools.cached_property
    def special_token_names(self) -> Mapping[str, str]:
        """The names of the special tokens by `bos_token` and the like, as chat templates use.

        Templates do not know the eos tokens of the generation config.
        """
        names = dict(self._backend.special_names())
        for role, ids in self._backend.declared_roles().items():
            for i in islice(ids, 1):
                name = self._control_names.get(i) or self._without_row.get(i) or self.table[i]
                names[f"{role}_token"] = name.decode("utf-8", "replace")
        return names

    @functools.cached_property
    def chat_templates(self) -> Mapping[str, str]:
        """The Jinja chat templates that the tokenizer brings, by name."""
        return self._backend.chat_templates()

    @functools.cached_property
    def drops_text(self) -> bool:
        """Whether the library leaves out, in silence, what it has no token for."""
        return self._backend.drops_text

    @functools.cached_property
    def keeps_text(self) -> bool:
        """Whether the library's ids are of all of a text, but for what its normalizer changes."""
        return self._backend.keeps_text

    @property
    def text_changes(self) -> Sequence[TextChange]:
        """The normalizers that change a text, with a description of each; usually empty."""
        return self._backend.text_changes()

    @functools.cached_property
    def _control_names(self) -> dict[int, bytes]:
        return {i: name.encode() for i, name in self.table.control_names.items() if name}

    @functools.cached_property
    def _added_ids(self) -> dict[str, int]:
        """The tokens that texts are split at, where the library does not find them itself."""
        ids = self.table.ids_of_type(TokenType.CONTROL).tolist()
        control = {name: i for i in reversed(ids) if (name := self.table.control_names[i])}
        if self._without_row:
            entries = (e for e in self._backend.entries() if e.id in self._without_row)
            control |= {e.content.decode(): e.id for e in entries if e.type is TokenType.CONTROL}
        return {**self._backend.text_tokens, **control}

    @functools.cached_property
    def _added_pattern(self) -> re.Pattern[str]:
        return splitting_at(self._added_ids)

    def _spells(self, ids: Sequence[int], data: bytes) -> bool:
        """Whether all ids are text and their bytes concatenate to `data`."""
        tokens = self._tokens
        try:
            parts = [tokens[i] for i in ids]
        except IndexError:  # an id that the vocabulary lacks
            return False
        return b"" not in parts and b"".join(parts) == data

    def _by_library(self, pieces: Sequence[bytes]) -> list[list[int] | None]:
        """Encode what is valid UTF-8 in the library's own way."""
        decoded = enumerate(map(utf8_text, pieces))
        texts = {row: text for row, text in decoded if text is not None}
        result: list[list[int] | None] = [None] * len(pieces)
        for row, ids in zip(texts, self.library_ids(list(texts.values())), strict=True):
            result[row] = ids
        return result

    def _by_byte_tokens(self, pieces: Sequence[bytes]) -> list[list[int] | None]:
        """Encode the runs of valid UTF-8 as text, and spell each byte between as a BYTE token."""
        runs_of = list(map(utf8_runs, pieces))
        texts = sorted({text for runs in runs_of for text in runs[::2]})
        ids_of = dict(zip(texts, self.library_ids(texts), strict=True))
        for i in self.table.ids_of_type(TokenType.BYTE).tolist():
            if self.table[i] >= b"\x80":
                ids_of[self.table[i].decode("ascii", "surrogateescape")] = [i]
        parts_of = [
            [part for place, run in enumerate(runs) for part in (run if place % 2 else [run])]
            for runs in runs_of
        ]
        return [
            [i for part in parts for i in ids_of[part]] if ids_of.keys() >= {*parts} else None
            for parts in parts_of
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
        if len(self.table.text_ids) == len(known):
            return ()
        count = Counter(filter(None, self.table.tokens()))
        shared = [token for token, n in count.items() if n > 1]
        emitted = zip(shared, self.segment_batch(shared), strict=True)
        return tuple(sorted(
            ids[0] for token, ids in emitted if ids and len(ids) == 1 and ids[0] != known[token]
        ))  # fmt: skip


def _require_utf8(texts: Sequence[str]) -> None:
    """Refuse half of a surrogate pair, which JSON can hold: libraries fail on it in their own ways.

    Raises:
        TokenizerError: names the text that has one.
    """
    for place, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start]
            raise TokenizerError(
                f"text {place}, {text[:40]!a}, contains {half!a}, half of a surrogate pair",
                hint="write the whole pair, or the character itself",
            ) from error


def _bounds(
    tokens: list[bytes], data: bytes, spans: Sequence[tuple[int, int]]
) -> tuple[list[int], int]:
    """Return where tokens begin in a text that is not their bytes, and how much of it was changed.

    Tokens whose spans overlap are one stretch, up to the next. In a stretch that is its tokens'
    bytes, they have their own places, but for a space that the library put before them. The tokens
    of any other have those of their spans, and share a character.
    """
    if not tokens:
        return [len(data)], len(data)
    begins, ends = np.array(spans).T
    ends = np.maximum.accumulate(ends)
    for i, token in enumerate(tokens):  # some libraries leave spaces out of a span
        last, text = ends[i - 1] if i else 0, token.lstrip()
        # If a normalizer replaces several characters, the span has only the last one.
        is_replaced = data[last : begins[i]].strip() and not data.startswith(text, begins[i])
        if i and is_replaced and data[begins[i - 1] : last] == tokens[i - 1].lstrip():
            begins[i] = last
        before = begins[i] - len(token) + len(text)
        if before >= last and data.startswith(token, before):
            begins[i] = before
        # Or all of it, where they put a space before it: the span is empty, and behind the text.
        before = begins[i] - len(text)
        if text and begins[i] == ends[i] and before >= last and data.startswith(text, before):
            begins[i] = before
    begins = np.minimum.accumulate(begins[::-1])[::-1]
    # An empty span, as of all bytes of a character but the last, is the beginning of the next one.
    is_new = (begins[1:] >= ends[:-1]) & (begins[:-1] < ends[:-1])
    firsts = [0, *(np.flatnonzero(is_new) + 1).tolist(), len(tokens)]
    starts: list[int] = []
    num_changed = 0
    for first, behind in pairwise(firsts):
        place = int(begins[first]) if first else 0
        end = int(begins[behind]) if behind < len(tokens) else len(data)
        group, stretch = tokens[first:behind], data[place:end]
        begin = int(begins[first])
        if len(group) > 1 and group[0].isspace() and not data[begin : begin + 1].isspace():
            starts.append(place)  # the library's own space
            num_changed += begin - place
            first, group, place, stretch = first + 1, group[1:], begin, data[begin:end]
        spelled = b"".join(group)
        if spelled in (stretch, b" " + stretch):
            after = accumulate(map(len, group), initial=end - len(spelled))
            starts += [max(start, place) for start in after][:-1]
            continue
        if len(group) > 1 or group[0].strip() != stretch.strip():  # no control token's whitespace
            num_changed += end - place
        places, indices = np.unique(begins[first:behind].clip(place, end), return_index=True)
        places[0] = place
        shared = np.interp(range(len(group)), [*indices, len(group)], [*places, end])
        starts += shared.astype(int).tolist()
    return [*starts, len(data)], num_changed


# Widths up to here are cheap, however few the tokens; the widest of models in use is 262,208.
_MANY_IDS = 1 << 20
# CodeLlama 7B Python lacks rows for 16 of 32,016 ids, Gemma 3 1B for one of 262,145.
_MOST_WITHOUT_ROW = 1 / 8


def _width(
    files: ModelFiles | None, model_id: str, vocab_size: int | None, largest: int, num_tokens: int
) -> tuple[int, str]:
    """Return the model's width and its source: an option, else the config, else the tokenizer.

    A few tokens may have no row in the model; a width that lacks many is of another model.
    """
    width, source, origin = vocab_size, "option", "as given"
    if width is None and files is not None and (of_model := model_vocab_size(files)):
        width, source = of_model
        origin = "from its config" if source == "config" else "the default of its model type"
    if width is None:
        width, source, origin = largest + 1, "tokenizer", "its largest token id + 1"
    problem = f"the vocabulary size {width} of {model_id} ({origin})"
    hint = "give the width of the model's logits with {option}"
    if 0 < width < (1 - _MOST_WITHOUT_ROW) * (largest + 1):
        problem += f" is too small for its largest token id {largest}"
        hint += f"; all but a few of the {largest + 1:,} ids have a row"
    elif source != "option" and width > max(_MANY_IDS, 4 * num_tokens):
        problem = f"{model_id} has {num_tokens} tokens, and a vocabulary size of {width} ({origin})"
        hint = "its files may be damaged; if the model is as wide as that, give {option}"
    elif not 0 < width <= MAX_WIDTH:
        problem += f" is not in 1..{MAX_WIDTH}"
    else:
        return width, source
    raise TokenizerError(problem, hint=hint, parameter="vocab_size")

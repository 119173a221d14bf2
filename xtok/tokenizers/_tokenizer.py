"""Define `Tokenizer`, which returns exact token bytes, exact spellings and the library's ids."""

from __future__ import annotations

import functools
import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, chain, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok.config import TokenForm
from xtok.errors import TokenizerError
from xtok.tokenizers._backend import (
    GENERATION_CONFIG,
    AddedNames,
    Backend,
    Roles,
    eos_ids,
    model_vocab_size,
    no_panic,
)
from xtok.tokenizers.display import escape, listed, plural, quoted
from xtok.tokenizers.hub import ModelFiles
from xtok.tokenizers.roles import find_roles
from xtok.tokenizers.table import (
    MAX_WIDTH,
    Decoded,
    TokenTable,
    TokenType,
    Vocabulary,
    utf8_runs,
    utf8_text,
)


class Encoding(NamedTuple):
    """The ids of a text with T tokens, and the byte range of each token.

    In the UTF-8 text, token i covers the bytes from `bounds[i]` to `bounds[i + 1]`.
    """

    ids: NDArray[np.int32]  # [T], token ids
    bounds: NDArray[np.int64]  # [T + 1], byte offset of each token, then the length of the text
    num_changed: int  # number of bytes that the library changed before encoding


class Tokenizer:
    """A tokenizer that returns the exact bytes of each token, and exact spellings of bytes.

    - `vocabulary`: the token table and its source.
    - `undecodable`: the text ids that have no bytes.
    - `location`: the folder, file or repo.
    - `name`: the argument of `load_tokenizer`.
    - `notes`: notes about loading.
    - `text_changes`: the name and a description of each component that changes a text before
      tokenization.
    - `drops_text`: whether the library silently drops text that has no token.
    - `keeps_text`: whether the ids cover the whole text, except for changes by the normalizer.
    """

    def __init__(
        self,
        backend: Backend,
        model_id: str,
        files: ModelFiles | None = None,
        location: str | Path | None = None,
        name: str | None = None,
        *,
        vocab_size: int | None = None,
    ) -> None:
        self.location, self._model_id, self.name = location, model_id, name or model_id
        self._backend, self._files = backend, files
        self.drops_text, self.keeps_text = backend.drops_text, backend.keeps_text
        self.text_changes = backend.text_changes
        decoded = Decoded(backend.entries())
        width, source = _width(files, model_id, vocab_size, decoded.ids)
        self._without_row = decoded.outside(width)
        self.undecodable = tuple(i for i in decoded.undecodable if i < width)
        num_ids = max((i + 1 for i in decoded.ids if i < width), default=0)
        table = decoded.table(width)
        del decoded  # frees its memory before the next steps
        self.table = replace(table, roles=find_roles(table, self.declared))
        self._tokens = self.table.tokens()
        if preferred := self._emitted_duplicates():
            self.table = replace(self.table, preferred_ids=preferred)
        self.vocabulary = Vocabulary(
            model_id=model_id,
            revision=(files.commit or files.revision) if files else None,
            backend=backend.name,
            vocab_size=width,
            width_source=source,
            tokenizer_vocab_size=num_ids,
            table=self.table,
        )
        self.notes = (*backend.notes, *self._notes_on_width(), *(files.notes if files else ()))

    def _notes_on_width(self) -> Iterator[str]:
        vocab = self.vocabulary
        if vocab.width_source == "tokenizer" and self._files and self._files.find("config.json"):
            yield (
                f"the config.json of {vocab.model_id} has no vocabulary size, so xtok uses the "
                f"width of the tokenizer, {vocab.vocab_size:,}; the model's logits may be wider"
            )
        if self._without_row:
            tokens = [*map(self._shown_without_row, self._without_row)]
            yield (
                f"{vocab.model_id} has only {vocab.vocab_size:,} logits, so xtok ignores "
                f"{plural(len(tokens), 'token')} of its tokenizer: {listed(tokens)}"
            )

    def _shown_without_row(self, token_id: int) -> str:
        return f"{quoted(escape(self._without_row[token_id]))} (id {token_id:,})"

    def __repr__(self) -> str:
        vocab = self.vocabulary
        return f"Tokenizer({vocab.model_id!r}, {vocab.backend}, {vocab.vocab_size} ids)"

    def at_width(self, vocab_size: int) -> Tokenizer:
        """Return a copy of the tokenizer for logits of a different width.

        Raises:
            TokenizerError: if the width excludes more than an eighth of the ids.
        """
        fields = self._backend, self._model_id, self._files, self.location, self.name
        return Tokenizer(*fields, vocab_size=vocab_size)

    def read_otherwise(self) -> tuple[str, Tokenizer] | None:
        """Load the same folder with a second reader, to compare the two results.

        Returns the name of the reader and its tokenizer, or None if there is no second reader. If
        Transformers loaded the folder, the second reader uses only the tokenizer file. Otherwise,
        the second reader is AutoTokenizer.
        """
        if (other := self._backend.other) is None:
            return None
        return other[0], Tokenizer(other[1](), model_id=self.vocabulary.model_id)

    def table_as(self, form: TokenForm, *, ignore: Collection[int] = ()) -> TokenTable:
        """Return the table with tokens in a form of `Decoded`. Ignored ids are UNUSED."""
        if form == "bytes" and not ignore:
            return self.table
        decoded = Decoded(self._backend.entries(), form=form, ignore=ignore)
        return decoded.table(len(self.table)).like(self.table)

    def segment(self, token: bytes | str) -> list[int]:
        """Return ids that spell a token's exact bytes in the middle of a text.

        The bytes are not normalized. The method tries four ways in this order: the library's
        encoder, the model's merges applied to bytes, byte tokens, and greedy longest match.

        >>> xtok.load_tokenizer("bytes").segment("né")
        [110, 195, 169]

        Raises:
            TokenizerError: if the vocabulary cannot spell the bytes.
        """
        if isinstance(token, str):
            _require_utf8([token])
            token = token.encode()
        [ids] = self.segment_batch([token])
        if ids is None:
            raise TokenizerError(
                f"{self.vocabulary.model_id} cannot spell the bytes {token[:40]!r}",
                hint="use a tokenizer with byte tokens or a byte-level vocabulary",
            )
        return ids

    def segment_batch(self, pieces: Sequence[bytes]) -> list[list[int] | None]:
        """Spell many byte strings. The result is None for a string that cannot be spelled."""
        result: list[list[int] | None] = [None] * len(pieces)
        ways: tuple[Callable[[list[bytes]], Iterable[list[int] | None]], ...] = (
            self._by_library,
            lambda batch: map(self._backend.encode_bytes, batch),
            self._by_byte_tokens,
            lambda batch: map(self._longest_match, batch),
        )
        todo = list(range(len(pieces)))
        with no_panic(self._model_id):
            for way in ways:
                for row, ids in zip(todo, way([pieces[row] for row in todo]), strict=True):
                    if ids is not None and self._spells(ids, pieces[row]):
                        result[row] = ids
                todo = [row for row in todo if result[row] is None]
                if not todo:
                    break
        return result

    def encode(self, text: str) -> Encoding:
        """Encode a text like the model's own library, without bos and eos around the text.

        Control tokens in the text are recognized, even if the library does not recognize control
        tokens.

        >>> xtok.load_tokenizer("bytes").encode("né").bounds.tolist()
        [0, 1, 2, 3]

        Raises:
            TokenizerError: if the library rejects the text, if the text contains an unpaired
                surrogate, or if the model has no logit for a token.
        """
        [ids] = self.encode_batch([text])
        data, tokens = text.encode(), self.table.named_tokens
        spelled = [tokens[i] if i < len(tokens) else b"" for i in ids]
        joined, num_changed = b"".join(spelled), 0
        if joined in (data, b" " + data):  # many libraries add a space before the text
            bounds = [*accumulate(map(len, spelled), initial=len(data) - len(joined))]
        else:
            bounds, num_changed = _bounds(spelled, data, self._spans(text))
        return Encoding(np.array(ids, np.int32), np.array(bounds, np.int64).clip(0), num_changed)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many texts like `encode`, and return only the ids.

        Raises:
            TokenizerError: for the same reasons as `encode`.
        """
        _require_utf8(texts)
        text_parts = [self._added.split(text) for text in texts]
        with no_panic(self._model_id):
            rows = self._backend.encode_starts([parts[0] for parts in text_parts])
            rest = self._backend.encode_texts([p for parts in text_parts for p in parts[2::2]])
        between = iter(rest)
        for ids, parts in zip(rows, text_parts, strict=True):
            for name in parts[1::2]:
                ids += [self._added.ids[name], *next(between)]
        if self._without_row:
            self._check_rows(texts, rows)
        return rows

    def _check_rows(self, texts: Sequence[str], rows: Iterable[Sequence[int]]) -> None:
        for text, ids in zip(texts, rows, strict=True):
            for i in filter(self._without_row.__contains__, ids):
                raise TokenizerError(
                    f"the text {text[:40]!r} contains the token {self._shown_without_row(i)}, but "
                    f"{self.vocabulary.model_id} has only {self.vocabulary.vocab_size:,} logits",
                    hint="remove the token from the text, because the model cannot read it",
                )

    def _spans(self, text: str) -> list[tuple[int, int]]:
        with no_panic(self._model_id):
            spans: list[tuple[int, int]] = []
            offset = 0
            for index, part in enumerate(self._added.split(text)):
                size = len(part.encode())
                inner = [(0, size)] if index % 2 else self._backend.spans(part, at_start=not index)
                spans += [(offset + start, offset + end) for start, end in inner]
                offset += size
            return spans

    def library_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts with the library, as parts of a longer text.

        The library may change the text. Names of control tokens are encoded as text. Raises a
        `TokenizerError` for an unpaired surrogate.
        """
        _require_utf8(texts)
        with no_panic(self._model_id):
            rows = self._backend.encode_texts(texts)
        return [self._respell(ids) for ids in rows] if self._without_row else rows

    def library_arrays(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Encode texts like `library_ids`, and return int32 arrays."""
        return [np.array(array("i", ids), np.int32) for ids in self.library_ids(texts)]

    def _respell(self, ids: list[int]) -> list[int]:
        """Replace or drop the ids for which the model has no logit."""
        if self._without_row.keys().isdisjoint(ids):
            return ids
        tokens = self._without_row
        parts = [(self._longest_match(tokens[i]) or []) if i in tokens else [i] for i in ids]
        return [i for part in parts for i in part]

    # The next properties are cached, because a backend can read files or query the hub.

    @functools.cached_property
    def declared(self) -> Roles:
        """The declared bos, eos, pad, unk, cls, sep and mask, as role → {id: source}.

        The tokenizer's eos comes before the eos ids in `generation_config.json`. A role with the
        value null has no ids. The dict does not contain undeclared roles.
        """
        roles = dict(self._backend.declared_roles())
        if eos := eos_ids(self._files) if self._files else []:
            own = roles.get("eos", {})
            roles["eos"] = {**dict.fromkeys([*own, *eos], GENERATION_CONFIG), **own}
        return roles

    @functools.cached_property
    def library(self) -> Any:
        """The tokenizer that Transformers loads from the folder, or None if loading fails."""
        with suppress(TokenizerError):
            return self._backend.library()
        return None

    @functools.cached_property
    def bos_id(self) -> int | None:
        """The declared bos id, or None if the library does not add this id before a text."""
        with no_panic(self._model_id):
            first = self._backend.ids_before()[:1]
        return next((i for i in first if i in self.declared.get("bos", ())), None)

    @functools.cached_property
    def definition_sha256(self) -> str:
        """Digest of the data that affects ids: tokens, merges, flags, normalizer, split pattern."""
        roles = {role: list(ids) for role, ids in self.declared.items()}
        facts = [self.vocabulary.backend, self.table.sha256(), roles]
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
        for part in self._backend.definition():
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()

    @functools.cached_property
    def special_token_names(self) -> Mapping[str, str]:
        """The special tokens that chat templates can use, by keys such as `bos_token`."""
        names = dict(self._backend.special_names())
        for role, ids in self._backend.declared_roles().items():
            for i in islice(ids, 1):
                name = self._without_row.get(i) or self.table.named_tokens[i]
                names[f"{role}_token"] = name.decode("utf-8", "replace")
        return names

    @functools.cached_property
    def chat_templates(self) -> Mapping[str, str]:
        """The tokenizer's Jinja chat templates, by name."""
        return self._backend.chat_templates()

    @functools.cached_property
    def _added(self) -> AddedNames:
        if self._backend.recognizes_names:
            return AddedNames({})
        ids = self.table.ids_of_type(TokenType.CONTROL).tolist()
        control = {name: i for i in reversed(ids) if (name := self.table.control_names[i])}
        if self._without_row:
            entries = (e for e in self._backend.entries() if e.id in self._without_row)
            control |= {e.content.decode(): e.id for e in entries if e.type is TokenType.CONTROL}
        return AddedNames({**self._backend.text_tokens, **control})

    def _spells(self, ids: Sequence[int], data: bytes) -> bool:
        tokens = self._tokens
        try:
            parts = [tokens[i] for i in ids]
        except IndexError:  # the vocabulary lacks this id
            return False
        return b"" not in parts and b"".join(parts) == data

    def _by_library(self, pieces: Sequence[bytes]) -> list[list[int] | None]:
        texts = list(map(utf8_text, pieces))
        rows = iter(self.library_ids([text for text in texts if text is not None]))
        return [None if text is None else next(rows) for text in texts]

    def _by_byte_tokens(self, pieces: Sequence[bytes]) -> list[list[int] | None]:
        """Spell invalid UTF-8 with byte tokens, and the text in between with the library."""
        runs_by_piece = list(map(utf8_runs, pieces))
        texts = sorted({text for runs in runs_by_piece for text in runs[::2]})
        ids_by_text = dict(zip(texts, self.library_ids(texts), strict=True))
        for i in self.table.ids_of_type(TokenType.BYTE).tolist():
            if self.table[i] >= b"\x80":
                ids_by_text[self.table[i].decode("ascii", "surrogateescape")] = [i]
        result: list[list[int] | None] = []
        for runs in runs_by_piece:
            parts = chain.from_iterable(run if i % 2 else [run] for i, run in enumerate(runs))
            ids = [ids_by_text.get(part) for part in parts]
            result.append(None if None in ids else [*chain.from_iterable(filter(None, ids))])
        return result

    def _longest_match(self, data: bytes) -> list[int] | None:
        canonical_ids = self.table.canonical_ids()
        ids: list[int] = []
        start = 0
        while start < len(data):
            for length in self._token_lengths:
                token = data[start : start + length]
                if token in canonical_ids:
                    ids.append(canonical_ids[token])
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
        """Return the ids that the tokenizer emits for bytes with several ids.

        An id that is already canonical is omitted.
        """
        canonical = self.table.canonical_ids()
        if len(self.table.text_ids) == len(canonical):
            return ()
        count = Counter(filter(None, self.table.tokens()))
        shared = [token for token, n in count.items() if n > 1]
        emitted = zip(shared, self.segment_batch(shared), strict=True)
        return tuple(sorted(
            ids[0] for token, ids in emitted if ids and len(ids) == 1 and ids[0] != canonical[token]
        ))  # fmt: skip


def _require_utf8(texts: Sequence[str]) -> None:
    """Reject unpaired surrogates, which JSON can contain but tokenizer libraries cannot encode."""
    for index, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start]
            raise TokenizerError(
                f"text {index}, {text[:40]!a}, contains the unpaired surrogate {half!a}, expected "
                "valid Unicode",
                hint="write both surrogates of the pair, or the character itself",
            ) from error


def _bounds(
    tokens: list[bytes], data: bytes, spans: Sequence[tuple[int, int]]
) -> tuple[list[int], int]:
    """Locate the tokens in a text that the library changed, and count the changed bytes.

    Tokens with overlapping spans form a group. `_stretch` locates the tokens of each group.
    """
    if not tokens:
        return [len(data)], len(data)
    span_starts, span_ends = _widen(tokens, data, spans)
    # If a character has several byte tokens, only the last token has a span. The empty spans before
    # this token belong to its span.
    is_new = (span_starts[1:] >= span_ends[:-1]) & (span_starts[:-1] < span_ends[:-1])
    firsts = [0, *(np.flatnonzero(is_new) + 1).tolist(), len(tokens)]
    starts: list[int] = []
    num_changed = 0
    for first, stop in pairwise(firsts):
        start = int(span_starts[first]) if first else 0
        end = int(span_starts[stop]) if stop < len(tokens) else len(data)
        stretch_bounds, changed = _stretch(
            tokens[first:stop], span_starts[first:stop], data, start, end
        )
        starts += stretch_bounds
        num_changed += changed
    return [*starts, len(data)], num_changed


def _widen(
    tokens: list[bytes], data: bytes, spans: Sequence[tuple[int, int]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Extend spans to include text that the library omitted. Returns the starts and the ends."""
    starts, ends = np.array(spans).T
    ends = np.maximum.accumulate(ends)
    for i, token in enumerate(tokens):
        last, text = ends[i - 1] if i else 0, token.lstrip()
        # If a normalizer replaces several characters, the span covers only the last character.
        is_replaced = data[last : starts[i]].strip() and not data.startswith(text, starts[i])
        if i and is_replaced and data[starts[i - 1] : last] == tokens[i - 1].lstrip():
            starts[i] = last
        # Some libraries omit spaces from a span.
        before = starts[i] - len(token) + len(text)
        if before >= last and data.startswith(token, before):
            starts[i] = before
        # If the library added a space, the span can be empty and lie after the token's text.
        before = starts[i] - len(text)
        if text and starts[i] == ends[i] and before >= last and data.startswith(text, before):
            starts[i] = before
    return np.minimum.accumulate(starts[::-1])[::-1], ends


def _stretch(
    tokens: list[bytes], span_starts: NDArray[np.int64], data: bytes, start: int, end: int
) -> tuple[list[int], int]:
    """Locate the tokens of a group in `data[start:end]`, and count the changed bytes.

    If the tokens do not spell `data[start:end]`, the library's spans determine the positions.
    """
    starts: list[int] = []
    num_changed = 0
    span_start = int(span_starts[0])
    if len(tokens) > 1 and tokens[0].isspace() and not data[span_start : span_start + 1].isspace():
        starts, num_changed = [start], span_start - start  # the library added a space
        tokens, span_starts, start = tokens[1:], span_starts[1:], span_start
    spelled, stretch = b"".join(tokens), data[start:end]
    if spelled in (stretch, b" " + stretch):
        offsets = accumulate(map(len, tokens), initial=end - len(spelled))
        return starts + [max(offset, start) for offset in offsets][:-1], num_changed
    # A control token can absorb adjacent white space.
    if len(tokens) > 1 or tokens[0].strip() != stretch.strip():
        num_changed += end - start
    firsts, indices = np.unique(span_starts.clip(start, end), return_index=True)
    firsts[0] = start
    shared = np.interp(range(len(tokens)), [*indices, len(tokens)], [*firsts, end])
    return starts + shared.astype(int).tolist(), num_changed


# Vocabularies up to this width need little memory. The widest published model has 262,208 ids.
_MANY_IDS = 1 << 20
# Maximum share of ids without a logit. CodeLlama 7B Python has 16 such ids among 32,016, and
# Gemma 3 1B has 1 among 262,145.
_MOST_WITHOUT_ROW = 1 / 8


def _width(
    files: ModelFiles | None, model_id: str, vocab_size: int | None, ids: Collection[int]
) -> tuple[int, str]:
    """Return the model's width, and its source: an option, the config or the tokenizer.

    The width can exclude a few ids of the tokenizer, for which the model has no logits.
    """
    largest, num_tokens = max(ids, default=-1), len(ids)
    width, source, origin = vocab_size, "option", "as specified"
    if width is None and files is not None and (model_width := model_vocab_size(files)):
        width, source = model_width
        origin = "from its config" if source == "config" else "the default of its model type"
    if width is None:
        width, source, origin = largest + 1, "tokenizer", "its largest token id + 1"
    problem = f"the vocabulary size {width} of {model_id} ({origin})"
    hint = "set the width of the model's logits with {option}"
    if 0 < width < (1 - _MOST_WITHOUT_ROW) * (largest + 1):
        problem += f" is too small for its largest token id {largest}"
    elif source != "option" and width > max(_MANY_IDS, 4 * num_tokens):
        problem = f"{model_id} has {num_tokens} tokens, but a vocabulary size of {width} ({origin})"
        hint = "its files may be damaged; if the size is correct, pass {option}"
    elif not 0 < width <= MAX_WIDTH:
        problem += f" is outside 1..{MAX_WIDTH}"
    else:
        return width, source
    raise TokenizerError(problem, hint=hint, parameter="vocab_size")

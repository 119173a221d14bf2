"""`doctor`: problems of a tokenizer, or between two, found before they cost a training run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from xtok.counting.counts import require_starts
from xtok.inspection import Check, Level
from xtok.inspection.chat_checks import ChatTrial
from xtok.inspection.text_facts import (
    EventFacts,
    TextCounts,
    TextFacts,
    count_text,
    loss_on_text,
)
from xtok.progress import TextProgress, silent_texts
from xtok.stages.events import events
from xtok.tokenizers import ModelLike, Tokenizer, as_tokenizers
from xtok.vocab.classes import suited_loss
from xtok.vocab.display import escape, plural, quoted
from xtok.vocab.roles import match_roles
from xtok.vocab.table import TokenTable, TokenType, match_bytes

_EXAMPLES = 3

# Text that must round-trip byte for byte, by kind. Written for this purpose.
PROBE: Mapping[str, str] = {
    "Latin scripts": "The ship's café opened in 1872; „Größe“ – naïve, Łódź, İstanbul, ngữ pháp.",
    "other scripts": "Маяк стоит. Ο φάρος. המגדלור. المنارة تضيء. प्रकाशस्तंभ। ประภาคาร. 등대가 있다. "
    "ถนน ქართული հայերեն አማርኛ தமிழ்",
    "Chinese and Japanese": "灯塔站在岩石上，共201级台阶。「灯台」は海の前に立っています。ｶﾀｶﾅ？",
    "numbers": "0 7 42 201 2024 12345678 3.14159 1,000,000 0x1F600 1e-9",
    "code": "def f(x):\n\tif x <= 3:\n        return {'a': [1, 2]}\n\n\nfor (;;) { i++; }\r\n",
    "emoji": "🌊⛵ 👩‍🔧 👍🏽 🏴󠁧󠁢󠁷󠁬󠁳󠁿 🇩🇪 ❤️ ☀",
    "odd whitespace": " a  b   c\t\td\n\n\ne \n f\u00a0g\u2003h\u200bi\u3000j   ",
}
# What normalizers are made to change: forms that are equal to others only by Unicode's rules.
_VARIANTS = "e\u0301 \u212b ﬁ ① Ａ ² ½ ㎞"


@dataclass(frozen=True, kw_only=True)
class NotRoundTripping:
    """Tokens that do not round-trip, for one cause; examples are escaped."""

    cause: str
    count: int
    examples: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TokenizerDiagnosis:
    """What `doctor` says of one tokenizer.

    Attributes:
        model_id: repo id as given, or the last component of a path.
        backend: the reader of the tokenizer.
        text_changes: normalizer to what it changes.
        vocab_size: the width of the model's logits.
        width_source: where that comes from.
        tokenizer_vocab_size: largest id + 1.
        partial_utf8: tokens that are not valid UTF-8 alone.
        not_round_tripping: tokens whose own text is encoded as other tokens, by cause.
        roles: role to the names of its tokens, the first few.
        turn_ends: the control tokens that end an assistant's turn, in order.
        tool_suffix_ids: the ids that a tool message and the prompt for an answer add; None if the
            template takes no tool messages.
        checks: everything that was looked at.
    """

    model_id: str
    backend: str
    text_changes: Mapping[str, str]
    vocab_size: int
    width_source: str
    tokenizer_vocab_size: int
    partial_utf8: int
    not_round_tripping: tuple[NotRoundTripping, ...]
    roles: Mapping[str, tuple[str, ...]]
    turn_ends: tuple[str, ...]
    tool_suffix_ids: tuple[int, ...] | None
    checks: tuple[Check, ...]


@dataclass(frozen=True, kw_only=True)
class PairDiagnosis:
    """What to expect of a map from a student to a teacher.

    Attributes:
        student: model id of the rows.
        teacher: model id of the columns.
        shared: student tokens whose bytes the teacher has.
        student_share: these, of the student's tokens with bytes.
        numerals: student tokens of two or more digits.
        numerals_shared: those that the teacher has.
        digits: the most digits in a token, of student and teacher.
        spaces: the longest token of spaces alone, of student and teacher.
        roles_without_counterpart: the student's roles whose tokens pair with none.
        loss: which loss suits.
        why: in a sentence.
        text: what text says of the pair; None without text.
        events: the pair's events by the bytes alone, on the text; None without text.
    """

    student: str
    teacher: str
    shared: int
    student_share: float
    numerals: int
    numerals_shared: int
    digits: tuple[int, int]
    spaces: tuple[int, int]
    roles_without_counterpart: tuple[str, ...]
    loss: str
    why: str
    text: TextFacts | None
    events: EventFacts | None


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What `doctor` found of each tokenizer; of two, what to expect of a map."""

    tokenizers: tuple[TokenizerDiagnosis, ...]
    pair: PairDiagnosis | None

    @property
    def failed(self) -> tuple[str, ...]:
        """The failed checks, as `MODEL: CHECK`."""
        return tuple(
            f"{one.model_id}: {check.name}"
            for one in self.tokenizers
            for check in one.checks
            if check.level == "failed"
        )

    @property
    def verdict(self) -> str:
        """A line: failed checks, the number of warnings and, for a pair, the loss that suits."""
        joined = " → " if self.pair is not None else ", "
        who = joined.join(one.model_id for one in self.tokenizers)
        warnings = sum(c.level == "warning" for one in self.tokenizers for c in one.checks)
        if self.failed:
            result = f"{plural(len(self.failed), 'check')} failed ({'; '.join(self.failed)})"
        else:
            result = f"no check failed, {plural(warnings, 'warning')}"
        suits = "" if self.pair is None else f"; {self.pair.loss} suits: {self.pair.why}"
        return f"{'failed' if self.failed else 'ok'}: {who}: {result}{suits}"


def doctor(
    models: ModelLike | Sequence[ModelLike],
    texts: str | Path | Sequence[str | Path] = (),
    *,
    template: str | Path | None = None,
    field: str = "text",
    text_progress: TextProgress = silent_texts,
) -> Diagnosis:
    """Look at tokenizers for what makes cross-tokenizer training go wrong.

    Args:
        models: a model as `load_tokenizer` takes it, a loaded tokenizer, or several of either; of
            exactly two, the first is the student of a map.
        texts: of two models: a path or glob of text to measure both directions and the pair's
            events on, or several, as `estimate` takes them.
        template: a chat template instead of the tokenizers' own, as `render` takes it.
        field: the field or column that holds the text.
        text_progress: called for the text.

    Raises:
        XtokError: if `template` or a text cannot be read, or there is nothing to measure in it.
        ValueError: for texts with other than two models.
    """
    tokenizers = as_tokenizers(models)
    pair, counts = None, None
    if texts:
        if len(tokenizers) != 2:
            raise ValueError(f"texts go with two models, not {len(tokenizers)}")
        counts = count_text(texts, tokenizers[0], tokenizers[1], field, text_progress)
        require_starts(
            counts.facts.boundaries, counts.documents, counts.facts.num_bytes, "measured"
        )
    if len(tokenizers) == 2:
        pair = _pair(tokenizers[0], tokenizers[1], counts)
    return Diagnosis(tokenizers=tuple(_diagnose(one, template) for one in tokenizers), pair=pair)


def _diagnose(tokenizer: Tokenizer, template: str | Path | None) -> TokenizerDiagnosis:
    vocabulary, table = tokenizer.vocabulary, tokenizer.table
    partial, lost = _round_trips(tokenizer)
    chat = ChatTrial(tokenizer, template)
    turn_ends, tool_suffix_ids = chat.turn_ends(), chat.tool_suffix_ids()
    round_trip = [f"{sum(one.count for one in lost):,} tokens"]
    for one in lost:
        examples = ", ".join(f"'{token}'" for token in one.examples)
        round_trip.append(f"{one.count:,} {one.cause}: {examples}")
    checks = (
        *_vocabulary_checks(tokenizer),
        Check("round trip", "note" if lost else "ok", "\n".join(round_trip)),
        *_role_checks(table),
        *_probe_checks(tokenizer),
        *chat.checks(turn_ends, tool_suffix_ids),
    )
    return TokenizerDiagnosis(
        model_id=vocabulary.model_id,
        backend=vocabulary.backend or "unknown",
        text_changes={change.normalizer: change.changes for change in tokenizer.text_changes},
        vocab_size=vocabulary.vocab_size,
        width_source=vocabulary.width_source,
        tokenizer_vocab_size=vocabulary.tokenizer_vocab_size or vocabulary.vocab_size,
        partial_utf8=partial,
        not_round_tripping=lost,
        roles={
            role: tuple(table.shown(i) for i in ids[:_EXAMPLES])
            for role, ids in table.roles.items()
        },
        turn_ends=tuple(map(table.name, turn_ends or ())),
        tool_suffix_ids=tool_suffix_ids,
        checks=checks,
    )


def _vocabulary_checks(tokenizer: Tokenizer) -> Iterator[Check]:
    """Check how the files were read, the width, and ids without bytes or with those of others."""
    vocabulary, report = tokenizer.vocabulary, tokenizer.report
    yield Check("backend", "ok", f"{vocabulary.backend}, as its files call for")
    for note in tokenizer.notes:
        yield Check("backend", "warning", note)
    if not tokenizer.text_changes:
        yield Check("normalizer", "ok", "none: text is its tokens' bytes")
    for change in tokenizer.text_changes:
        yield Check("normalizer", "warning", f"{change.normalizer}: {change.changes}")
    message = (
        f"{vocabulary.vocab_size:,} (from the {vocabulary.width_source}), largest id "
        f"{(vocabulary.tokenizer_vocab_size or 1) - 1:,}, {report.num_unused:,} ids without a token"
    )
    known = vocabulary.width_source != "tokenizer"
    unknown = "" if known else "; the model's own width is not known"
    yield Check("width", "ok" if known else "note", message + unknown)
    empty = report.undecodable
    shown = f"{len(empty):,} ids: {', '.join(map(str, empty[:_EXAMPLES]))}" if empty else "none"
    yield Check("decode to nothing", "failed" if empty else "ok", shown)
    yield _duplicates(tokenizer.table)


def _duplicates(table: TokenTable) -> Check:
    ids_of: dict[bytes, list[int]] = defaultdict(list)
    for token_id, token in enumerate(table.tokens()):
        if token:
            ids_of[token].append(token_id)
    shared = {token: ids for token, ids in ids_of.items() if len(ids) > 1}
    if not shared:
        return Check("duplicates", "ok", "none: no two ids have the same bytes")
    some = list(shared.items())[:_EXAMPLES]
    examples = ", ".join(f"{quoted(escape(token))} {ids}" for token, ids in some)
    count = sum(map(len, shared.values())) - len(shared)
    return Check("duplicates", "note", f"{count:,} ids have bytes that another has: {examples}")


def _round_trips(tokenizer: Tokenizer) -> tuple[int, tuple[NotRoundTripping, ...]]:
    """Encode every token alone; return how many are partial UTF-8, and what does not round-trip."""
    table, tokens = tokenizer.table, tokenizer.table.tokens()
    ids, texts = [], []
    causes: dict[str, list[int]] = defaultdict(list)
    for token_id, token in enumerate(tokens):
        if token:
            try:
                texts.append(token.decode())
                ids.append(token_id)
            except UnicodeDecodeError:
                causes["part of a character"].append(token_id)
    partial = sum(map(len, causes.values()))
    for token_id, spelled in zip(ids, tokenizer.library_ids(texts), strict=True):
        if spelled == [token_id]:
            continue
        if b"".join([tokens[i] for i in spelled]) != tokens[token_id]:
            cause = "the normalizer changes it"
        elif table.types[token_id] == TokenType.BYTE:
            cause = "a byte token; another is given for this character"
        elif len(spelled) == 1:
            cause = "another id has its bytes"
        else:
            cause = "the pattern or the merges never give it"
        causes[cause].append(token_id)
    return partial, tuple(
        NotRoundTripping(
            cause=cause,
            count=len(lost),
            examples=tuple(table.shown(i) for i in lost[:_EXAMPLES]),
        )
        for cause, lost in causes.items()
    )


def _role_checks(table: TokenTable) -> Iterator[Check]:
    reserved = len(table.roles.get("reserved", ()))
    named = ", ".join(role for role in table.roles if role != "reserved") or "none"
    message = f"{len(table.control_names):,}, {reserved:,} of them reserved; roles: {named}"
    yield Check("special tokens", "ok", message)
    eos, pad = table.roles.get("eos", ()), table.roles.get("pad", ())
    names = ", ".join(map(table.shown, eos))
    if eos:
        yield Check("eos", "ok", f"{names}; no token of its own ends a document, so eos does")
    else:
        yield Check("eos", "failed", "none: nothing ends a document")
    both = set(pad) & set(eos)
    if not pad:
        message = "none: set one before batching; an unused or reserved id works"
    elif both:
        message = f"{table.shown(min(both))} is eos as well: a mask made from it hides the ends of "
        message += "turns"
    else:
        message = ", ".join(map(table.shown, pad))
    yield Check("pad", "ok" if pad and not both else "warning", message)


def _probe_checks(tokenizer: Tokenizer) -> Iterator[Check]:
    texts = [*PROBE.values(), _VARIANTS]
    tokens = tokenizer.table.tokens()
    back = [b"".join([tokens[i] for i in ids]) for ids in tokenizer.library_ids(texts)]
    differences = [_difference(t.encode(), b) for t, b in zip(texts, back, strict=True)]
    wrong = [f"{kind}: {how}" for kind, how in zip(PROBE, differences, strict=False) if how]
    size = sum(len(text.encode()) for text in PROBE.values())
    if wrong:
        message = "\n".join(["does not come back byte for byte", *wrong])
        yield Check("probe text", "failed", message)
    else:
        yield Check("probe text", "ok", f"{size} bytes come back: {', '.join(PROBE)}")
    if differences[-1]:
        level: Level = "warning" if tokenizer.text_changes else "failed"
        yield Check("Unicode variants", level, f"do not come back: {differences[-1]}")
    else:
        yield Check("Unicode variants", "ok", "come back as they are")


def _difference(text: bytes, decoded: bytes) -> str:
    """Show where two byte strings part, from the beginning of that character on; "" if nowhere."""
    if text == decoded:
        return ""
    pairs = enumerate(zip_longest(text, decoded))
    place = next(i for i, (a, b) in pairs if a != b)
    while place and text[place : place + 1] and text[place] & 0xC0 == 0x80:
        place -= 1
    shown = []
    for data in (text, decoded):
        part = data[place : place + 12]
        shown.append(quoted(escape(part.decode("utf-8", "ignore").encode() or part)))
    return " becomes ".join(shown)


def _pair(student: Tokenizer, teacher: Tokenizer, counts: TextCounts | None) -> PairDiagnosis:
    rows, columns = student.table, teacher.table
    shared, paired = match_bytes(rows, columns), match_roles(rows, columns)
    share = len(shared) / max(1, len(rows.text_ids))
    numerals = [i for i, token in enumerate(rows.tokens()) if _digits(token) > 1]
    numerals_shared = sum(i in shared for i in numerals)
    loss, why = suited_loss(share, len(numerals), numerals_shared)
    on_text = None
    if counts is not None:
        on_text = EventFacts.of(events(student, teacher), counts)
        loss, why = loss_on_text(counts.facts, on_text)
    if rows.sha256() == columns.sha256():
        loss, why = "plain KL", "both have the same vocabulary: no map is needed"
    return PairDiagnosis(
        student=student.vocabulary.model_id,
        teacher=teacher.vocabulary.model_id,
        shared=len(shared),
        student_share=share,
        numerals=len(numerals),
        numerals_shared=numerals_shared,
        digits=(_most_digits(rows), _most_digits(columns)),
        spaces=(_longest_spaces(rows), _longest_spaces(columns)),
        roles_without_counterpart=tuple(
            role
            for role, ids in rows.roles.items()
            if role != "reserved" and not any(i in paired or i in shared for i in ids)
        ),
        loss=loss,
        why=why,
        text=None if counts is None else counts.facts,
        events=on_text,
    )


def _digits(token: bytes) -> int:
    """Return how many digits a token has, if it has nothing else but spaces around them."""
    number = token.strip(b" ")
    return len(number) if number.isdigit() else 0


def _most_digits(table: TokenTable) -> int:
    counts = Counter(map(_digits, table.tokens()))
    return max((n for n, count in counts.items() if n and (count >= 10 or n == 1)), default=0)


def _longest_spaces(table: TokenTable) -> int:
    return max((len(t) for t in table.tokens() if t and not t.strip(b" ")), default=0)

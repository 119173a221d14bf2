"""`doctor`: problems of a tokenizer, or between two, found before they cost a training run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from xtok.conversation.checks import Check, Level, check_chats
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
    models: ModelLike | Sequence[ModelLike], *, template: str | Path | None = None
) -> Diagnosis:
    """Look at tokenizers for what makes cross-tokenizer training go wrong.

    Args:
        models: a model as `load_tokenizer` takes it, a loaded tokenizer, or several of either; of
            exactly two, the first is the student of a map.
        template: a chat template instead of the tokenizers' own, as `render` takes it.

    Raises:
        XtokError: if `template` cannot be read.
    """
    tokenizers = as_tokenizers(models)
    return Diagnosis(
        tokenizers=tuple(_diagnose(one, template) for one in tokenizers),
        pair=_pair(*tokenizers) if len(tokenizers) == 2 else None,
    )


def _diagnose(tokenizer: Tokenizer, template: str | Path | None) -> TokenizerDiagnosis:
    vocabulary, table = tokenizer.vocabulary, tokenizer.table
    partial, lost = _round_trips(tokenizer)
    chat = check_chats(tokenizer, template)
    checks = (
        *_backend_checks(tokenizer),
        *_width_checks(tokenizer),
        _duplicates(table),
        _round_trip_check(lost),
        *_role_checks(table),
        *_probe_checks(tokenizer),
        *chat.checks,
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
        turn_ends=chat.turn_ends,
        tool_suffix_ids=chat.tool_suffix_ids,
        checks=checks,
    )


# The vocabulary


def _backend_checks(tokenizer: Tokenizer) -> Iterator[Check]:
    backend = tokenizer.vocabulary.backend
    yield Check(name="backend", level="ok", message=f"{backend}, as its files call for")
    for note in tokenizer.notes:
        yield Check(name="backend", level="warning", message=note)
    if not tokenizer.text_changes:
        yield Check(name="normalizer", level="ok", message="none: text is its tokens' bytes")
    for change in tokenizer.text_changes:
        message = f"{change.normalizer}: {change.changes}"
        yield Check(name="normalizer", level="warning", message=message)


def _width_checks(tokenizer: Tokenizer) -> Iterator[Check]:
    vocabulary, report = tokenizer.vocabulary, tokenizer.report
    largest = (vocabulary.tokenizer_vocab_size or 1) - 1
    message = (
        f"{vocabulary.vocab_size:,} (from the {vocabulary.width_source}), "
        f"largest id {largest:,}, {report.num_unused:,} ids without a token"
    )
    known = vocabulary.width_source != "tokenizer"
    if not known:
        message += "; the model's own width is not known"
    yield Check(name="width", level="ok" if known else "note", message=message)
    empty = report.undecodable
    shown = f"{len(empty):,} ids: {', '.join(map(str, empty[:_EXAMPLES]))}" if empty else "none"
    yield Check(name="decode to nothing", level="failed" if empty else "ok", message=shown)


def _duplicates(table: TokenTable) -> Check:
    ids_of: dict[bytes, list[int]] = defaultdict(list)
    for token_id, token in enumerate(table.tokens()):
        if token:
            ids_of[token].append(token_id)
    shared = {token: ids for token, ids in ids_of.items() if len(ids) > 1}
    if not shared:
        return Check(name="duplicates", level="ok", message="none: no two ids have the same bytes")
    some = list(shared.items())[:_EXAMPLES]
    examples = [f"{quoted(escape(token))} {ids}" for token, ids in some]
    count = sum(map(len, shared.values())) - len(shared)
    message = f"{count:,} ids have bytes that another has: {', '.join(examples)}"
    return Check(name="duplicates", level="note", message=message)


def _round_trips(tokenizer: Tokenizer) -> tuple[int, tuple[NotRoundTripping, ...]]:
    """Encode every token alone; return how many are partial UTF-8, and what does not round-trip."""
    table, tokens = tokenizer.table, tokenizer.table.tokens()
    ids, texts = [], []
    causes: dict[str, list[int]] = defaultdict(list)
    partial = 0
    for token_id, token in enumerate(tokens):
        if token:
            try:
                texts.append(token.decode())
                ids.append(token_id)
            except UnicodeDecodeError:
                partial += 1
                causes["part of a character"].append(token_id)
    for token_id, found in zip(ids, tokenizer.library_ids(texts), strict=True):
        if found == [token_id]:
            continue
        spelled = b"".join([tokens[i] for i in found])
        if spelled != tokens[token_id]:
            cause = "the normalizer changes it"
        elif table.types[token_id] == TokenType.BYTE:
            cause = "a byte token; another is given for this character"
        elif len(found) == 1:
            cause = "another id has its bytes"
        else:
            cause = "the pattern or the merges never give it"
        causes[cause].append(token_id)
    return partial, tuple(
        NotRoundTripping(
            cause=cause,
            count=len(found),
            examples=tuple(table.shown(i) for i in found[:_EXAMPLES]),
        )
        for cause, found in causes.items()
    )


def _round_trip_check(lost: Sequence[NotRoundTripping]) -> Check:
    total = sum(one.count for one in lost)
    parts = [
        f"{one.count:,} {one.cause}: " + ", ".join(f"'{token}'" for token in one.examples)
        for one in lost
    ]
    message = f"{total:,} tokens" + (f"\n{chr(10).join(parts)}" if parts else "")
    return Check(name="round trip", level="note" if total else "ok", message=message)


def _role_checks(table: TokenTable) -> Iterator[Check]:
    roles = table.roles
    named = [role for role in roles if role != "reserved"]
    reserved = len(roles.get("reserved", ()))
    yield Check(
        name="special tokens",
        level="ok",
        message=f"{len(table.control_names):,}, {reserved:,} of them reserved; roles: "
        f"{', '.join(named) or 'none'}",
    )
    eos, pad = roles.get("eos", ()), roles.get("pad", ())
    if not eos:
        yield Check(name="eos", level="failed", message="none: nothing ends a document")
    else:
        names = ", ".join(table.shown(i) for i in eos)
        message = f"{names}; no token of its own ends a document, so eos does"
        yield Check(name="eos", level="ok", message=message)
    if not pad:
        message = "none: set one before batching; an unused or reserved id works"
        yield Check(name="pad", level="warning", message=message)
    elif set(pad) & set(eos):
        name = table.shown(min(set(pad) & set(eos)))
        message = f"{name} is eos as well: a mask made from it hides the ends of turns"
        yield Check(name="pad", level="warning", message=message)
    else:
        yield Check(name="pad", level="ok", message=", ".join(table.shown(i) for i in pad))


def _probe_checks(tokenizer: Tokenizer) -> Iterator[Check]:
    texts = [*PROBE.values(), _VARIANTS]
    tokens = tokenizer.table.tokens()
    back = [b"".join([tokens[i] for i in ids]) for ids in tokenizer.library_ids(texts)]
    wrong = [
        f"{kind}: {_difference(text.encode(), decoded)}"
        for (kind, text), decoded in zip(PROBE.items(), back[:-1], strict=True)
        if decoded != text.encode()
    ]
    if wrong:
        message = "\n".join(["does not come back byte for byte", *wrong])
        yield Check(name="probe text", level="failed", message=message)
    else:
        size = sum(len(text.encode()) for text in PROBE.values())
        kinds = ", ".join(PROBE)
        yield Check(name="probe text", level="ok", message=f"{size} bytes come back: {kinds}")
    if back[-1] != _VARIANTS.encode():
        level: Level = "warning" if tokenizer.text_changes else "failed"
        message = f"do not come back: {_difference(_VARIANTS.encode(), back[-1])}"
        yield Check(name="Unicode variants", level=level, message=message)
    else:
        yield Check(name="Unicode variants", level="ok", message="come back as they are")


def _difference(text: bytes, decoded: bytes) -> str:
    """Show where two byte strings part, from the beginning of that character on."""
    place = next(
        (i for i, (a, b) in enumerate(zip(text, decoded, strict=False)) if a != b),
        min(len(text), len(decoded)),
    )
    while place and text[place : place + 1] and text[place] & 0xC0 == 0x80:
        place -= 1

    def cut(data: bytes) -> str:
        shown = data[place : place + 12].decode("utf-8", "ignore").encode()
        return quoted(escape(shown or data[place : place + 12]))

    return f"{cut(text)} becomes {cut(decoded)}"


# Two of them


def _pair(student: Tokenizer, teacher: Tokenizer) -> PairDiagnosis:
    rows, columns = student.table, teacher.table
    shared = match_bytes(rows, columns)
    with_bytes = max(1, len(rows.text_ids))
    numerals = [i for i, t in enumerate(rows.tokens()) if len(t.strip(b" ")) > 1 and _digits(t)]
    numerals_shared = sum(i in shared for i in numerals)
    paired = match_roles(rows, columns)
    lonely = tuple(
        role
        for role, ids in rows.roles.items()
        if role != "reserved" and not any(i in paired or i in shared for i in ids)
    )
    share = len(shared) / with_bytes
    same = rows.sha256() == columns.sha256()
    loss, why = suited_loss(share, len(numerals), numerals_shared)
    if same:
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
        roles_without_counterpart=lonely,
        loss=loss,
        why=why,
    )


def _digits(token: bytes) -> bool:
    return token.strip(b" ").isdigit()


def _most_digits(table: TokenTable) -> int:
    counts = Counter(len(t.strip(b" ")) for t in table.tokens() if _digits(t))
    return max((n for n, count in counts.items() if count >= 10 or n == 1), default=0)


def _longest_spaces(table: TokenTable) -> int:
    return max((len(t) for t in table.tokens() if t and not t.strip(b" ")), default=0)

"""`doctor`: find problems of a tokenizer or a pair before training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from xtok._lib.progress import Progress, silent
from xtok._lib.ragged import num_common
from xtok._lib.shards import Paths, format_of
from xtok.building.counting.pair_text import PairText
from xtok.config import ChatTemplates
from xtok.conversation.texts import find_texts, read_samples
from xtok.errors import TokenizerError, naming_template
from xtok.inspection.advice import WHEN_TO_DISTIL, Advice, advise
from xtok.inspection.chat_checks import ChatTrial
from xtok.inspection.first_rows import first_rows, row_checks
from xtok.inspection.pair_facts import PairFacts, TextFacts, pair_facts
from xtok.inspection.results import Check, Level
from xtok.tokenizers import ModelLike, Tokenizer, load_pair, load_tokenizer
from xtok.tokenizers.display import escape, listed, plural, quoted
from xtok.tokenizers.notes import case_notes, examples_of
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.table import SIDES, TokenTable, TokenType, utf8_text

_TOKENS_AT_ONCE = 1 << 13
"""Number of tokens per batch, because the library needs much memory per token."""

_PROBE_TEXT = "probe text"
# Texts that must round-trip byte for byte, by kind, written for this check.
_PROBE: Mapping[str, str] = {
    "Latin scripts": "The ship's café opened in 1872; „Größe“ – naïve, Łódź, İstanbul, ngữ pháp.",
    "other scripts": "Маяк стоит. Ο φάρος. המגדלור. المنارة تضيء. प्रकाशस्तंभ। ประภาคาร. 등대가 있다. "
    "ถนน ქართული հայերեն አማርኛ தமிழ்",
    "Chinese and Japanese": "灯塔站在岩石上，共201级台阶。「灯台」は海の前に立っています。ｶﾀｶﾅ？",
    "numbers": "0 7 42 201 2024 12345678 3.14159 1,000,000 0x1F600 1e-9",
    "code": "def f(x):\n\tif x <= 3:\n        return {'a': [1, 2]}\n\n\nfor (;;) { i++; }\r\n",
    "emoji": "🌊⛵ 👩‍🔧 👍🏽 🏴󠁧󠁢󠁷󠁬󠁳󠁿 🇩🇪 ❤️ ☀",
    "odd whitespace": " a  b   c\t\td\n\n\ne \n f\u00a0g\u2003h\u200bi\u3000j   ",
}
_SPACE = "\u2581"  # the space character in SentencePiece vocabularies
# Unicode variants that normalizers change intentionally.
_VARIANTS = "e\u0301 \u212b ﬁ ① Ａ ² ½ ㎞"


@dataclass(frozen=True, kw_only=True)
class TokenizerDiagnosis:
    """Results of `doctor` for one tokenizer."""

    model_id: str
    not_round_tripping: Mapping[str, int]  # number of tokens by cause
    turn_ends: tuple[str, ...]  # control tokens that end an assistant turn, in order
    # ids of a tool message and the next prompt; None if the template rejects tool messages
    tool_suffix_ids: tuple[int, ...] | None
    checks: tuple[Check, ...]


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Results of `doctor` for one tokenizer or a pair."""

    tokenizers: tuple[TokenizerDiagnosis, ...]  # a single diagnosis if both models are the same
    pair: PairFacts | None  # None for one model
    advice: Advice | None  # None for one model, or if the test text does not round-trip
    pair_checks: tuple[Check, ...]

    @property
    def failed(self) -> tuple[str, ...]:
        """The failed checks, formatted as `MODEL: CHECK`."""
        checks = ((t.model_id, check) for t in self.tokenizers for check in t.checks)
        return tuple(f"{model}: {check.name}" for model, check in checks if check.level == "failed")

    @property
    def summary(self) -> str:
        """One line with the failed checks, the number of warnings, and the advice."""
        checks = [*self.pair_checks, *(c for t in self.tokenizers for c in t.checks)]
        warnings = sum(check.level == "warning" for check in checks)
        result = f"no check failed, {plural(warnings, 'warning')}"
        if self.failed:
            result = f"{plural(len(self.failed), 'check')} failed ({'; '.join(self.failed)})"
        level = "failed" if self.failed else "ok"
        if self.pair is None:
            return f"{level}: {self.tokenizers[0].model_id}: {result}"
        advice = "No loss is recommended, because text does not round-trip."
        if self.advice is not None:
            advice = f"{self.advice.sentence} {WHEN_TO_DISTIL}"
        return f"{level}: {self.pair.student} → {self.pair.teacher}: {result}. {advice}"


def doctor(
    student_model: ModelLike | Pair,
    teacher_model: ModelLike | None = None,
    texts: Paths = (),
    *,
    templates: ChatTemplates | None = None,
    tools: bool = False,
    field: str = "text",
    progress: Progress = silent,
) -> Diagnosis:
    """Check a tokenizer or a pair for problems that break cross-tokenizer training.

    >>> xtok.doctor("bytes", "bytes").advice.loss  # the same tokenizer on both sides
    'plain KL'

    Args:
        student_model: a model (see `load_tokenizer`), a loaded tokenizer, or a pair.
        teacher_model: a second model; None for one model or a pair.
        texts: paths and globs of files with texts or conversations on which the pair is measured.
            The first rows are also compared with the models' own libraries.
        templates: chat templates to use instead of the tokenizers' own.
        tools: report a failure instead of a warning if the template rewrites earlier turns after a
            tool result.
        field: the field or column with the text.
        progress: called for each pass over a vocabulary or the text.

    Raises:
        XtokError: if a template or a text cannot be read, or the text contains nothing to measure.
        ValueError: if texts are given for one model.
    """
    templates = ChatTemplates.or_default(templates)
    is_single = teacher_model is None and not isinstance(student_model, Pair)
    if texts and is_single:
        raise ValueError("texts require two models")
    pair = None if is_single else load_pair(student_model, teacher_model)
    tokenizers = (load_tokenizer(student_model),) if pair is None else pair.tokenizers
    trials = []
    for side, tokenizer, template in zip(SIDES, tokenizers, templates.templates, strict=False):
        with naming_template(f"{side}_template"):
            trials.append(ChatTrial(tokenizer, template))
    distinct = {(trial.tokenizer, trial.template): trial for trial in trials}.values()
    diagnosed = tuple(_diagnose(trial, tools, progress) for trial in distinct)
    if pair is None:
        return Diagnosis(tokenizers=diagnosed, pair=None, advice=None, pair_checks=())
    facts, checks = _checked_pair(pair, texts, templates, field, progress)
    # Every loss compares the two sides over the bytes of a text, so text must round-trip.
    failed = {c.name for t in diagnosed for c in t.checks if c.level == "failed"}
    return Diagnosis(
        tokenizers=diagnosed,
        pair=facts,
        advice=None if _PROBE_TEXT in failed else advise(facts, [t.name for t in tokenizers]),
        pair_checks=(_turn_end_check(pair, *trials), *checks),
    )


def _checked_pair(
    pair: Pair, texts: Paths, templates: ChatTemplates, field: str, progress: Progress
) -> tuple[PairFacts, list[Check]]:
    text, checks = None, list[Check]()
    if texts:
        checks += row_checks(pair, first_rows(texts, field), templates.templates)
        text = PairText.read(pair, texts, field=field, progress=progress)
        checks += _context_checks(texts, field)
    facts = pair_facts(pair, text, progress=progress)
    checks += (Check("upper case", "warning", note) for note in case_notes(pair))
    return facts, [_text_check(facts.text), *checks] if facts.text else checks


def _text_check(text: TextFacts) -> Check:
    if text.left_out is None:
        return Check("text", "ok", "both sides have the same bytes for the whole text")
    level: Level = "note" if text.grade == "note" else "warning"
    return Check("text", level, text.left_out.sentence)


def _context_checks(texts: Paths, field: str) -> Iterator[Check]:
    rows, with_context, ratio = contexts_in(texts, field)
    if with_context:
        message = f"{with_context:,} of {rows:,} rows have a teacher_context, so the teacher "
        yield Check("teacher_context", "ok", f"{message}reads {ratio:.1f} times as many bytes")


def contexts_in(texts: Paths, field: str) -> tuple[int, int, float]:
    """Measure how much `teacher_context` lengthens texts.

    Returns the number of rows, the number of rows with a context, and a ratio. The ratio is the
    byte length of the rows with a context, each with its longest context, divided by the byte
    length of the same rows without context.
    """
    rows = with_context = size = num_added = 0
    paths = [path for path in find_texts(texts) if format_of(path) != "text"]
    columns = field, "teacher_context"  # not all columns, because candidates need much memory
    for _, row in read_samples(paths, columns):
        if isinstance(row, dict) and isinstance(text := row.get(field), str):
            context = row.get("teacher_context")
            parts = context if isinstance(context, list) else [context]
            longest = max((_num_bytes(part) for part in parts if isinstance(part, str)), default=0)
            rows, with_context = rows + 1, with_context + (longest > 0)
            size, num_added = size + _num_bytes(text) * (longest > 0), num_added + longest
    return rows, with_context, 1 + num_added / max(1, size)


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))  # an unpaired surrogate has 3 bytes


def _turn_end_check(pair: Pair, student: ChatTrial, teacher: ChatTrial) -> Check:
    """Check that student and teacher end an answer with the same token.

    If the tokens differ, as for a base model and an instruct model, the teacher assigns almost no
    probability to the student's end token. The student's answers then become longer and longer.
    """
    name = "ends of turn"
    if {int(pair.partners[i]) for i in student.ends} & {*teacher.ends}:
        return Check(name, "ok", f"{student.shown_end} / {teacher.shown_end}")
    message = (
        f"the student's answers end with {student.shown_end}, the teacher's with "
        f"{teacher.shown_end}, so the student does not learn to stop: use the same chat template "
        "for both sides, or set eos_token in the student's tokenizer_config.json"
    )
    return Check(name, "warning", message)


def _diagnose(chat: ChatTrial, tools: bool, progress: Progress) -> TokenizerDiagnosis:
    tokenizer, table = chat.tokenizer, chat.tokenizer.table
    model_id = tokenizer.vocabulary.model_id
    with progress(f"checking {model_id}", len(table.text_ids)) as advance:
        lost = _round_trips(tokenizer, advance)
    lines = [f"{sum(map(len, lost.values())):,} tokens"]
    lines += (f"{len(ids):,} {why}: {listed(map(table.quoted, ids))}" for why, ids in lost.items())
    return TokenizerDiagnosis(
        model_id=model_id,
        not_round_tripping={cause: len(ids) for cause, ids in lost.items()},
        turn_ends=tuple(map(table.name, chat.turn_ends or ())),
        tool_suffix_ids=chat.tool_suffix_ids,
        checks=(
            *_vocabulary_checks(tokenizer),
            Check("round trip", "note" if lost else "ok", "\n".join(lines)),
            *_role_checks(tokenizer),
            *_probe_checks(tokenizer),
            *chat.checks(tools=tools),
        ),
    )


def _vocabulary_checks(tokenizer: Tokenizer) -> Iterator[Check]:
    vocabulary, empty = tokenizer.vocabulary, tokenizer.undecodable
    yield Check("backend", "ok", f"{vocabulary.backend}, as the files require")
    for note in tokenizer.notes:
        yield Check("backend", "warning", note)
    if difference := _other_reading(tokenizer):
        yield Check("backend", "note", difference)
    for change in tokenizer.text_changes:
        yield Check("normalizer", "warning", ": ".join(change))
    if not tokenizer.text_changes:
        how = _difference(_SPACE.encode(), *_decode(tokenizer, [_SPACE]))
        yield Check("normalizer", "note" if how else "ok", f"none, but {how}" if how else "none")
    yield _width_check(tokenizer)
    shown = examples_of(empty, None, "id") if empty else "none"
    yield Check("decode to nothing", "failed" if empty else "ok", shown)
    yield _duplicates(tokenizer.table)


def _width_check(tokenizer: Tokenizer) -> Check:
    vocabulary = tokenizer.vocabulary
    is_unknown = vocabulary.width_source == "tokenizer"
    message = (
        f"{vocabulary.vocab_size:,} (from the {vocabulary.width_source}), largest id "
        f"{(vocabulary.tokenizer_vocab_size or 1) - 1:,}, "
        f"{len(tokenizer.table.ids_of_type(TokenType.UNUSED)):,} ids without a token"
    )
    message += "; the model's width is unknown" * is_unknown
    return Check("width", "note" if is_unknown else "ok", message)


def _other_reading(tokenizer: Tokenizer) -> str:
    """Load the same files with a second library; return the first difference in ids, or "".

    The second library is AutoTokenizer, or a reader that uses only the tokenizer file. Ids are
    compared, because different ids can decode to the same text.
    """
    words = [word for text in _PROBE.values() for word in text.split()]
    table = tokenizer.table
    control = table.ids_of_type(TokenType.CONTROL).tolist()
    special = [f"a{table.control_names[i]} 1" for i in control]
    texts = [*words, *_PROBE.values(), *special]
    try:
        other = tokenizer.read_otherwise()
        if other is None:
            return ""
        name, reading = other
        rows = zip(texts, *(t.encode_batch(texts) for t in (tokenizer, reading)), strict=True)
    except TokenizerError:
        return "ids are not compared, because no other library reads the tokenizer files"
    differing = [row for row in rows if row[1] != row[2]]
    if not differing:
        return ""
    text, ids, others = min(differing, key=lambda row: len(row[0]))
    return (
        f"{name} returns other ids for {len(differing)} of {len(texts)} texts: "
        f"for {quoted(escape(text.encode()))}, [{listed(others, 6)}] instead of [{listed(ids, 6)}]"
    )


def _duplicates(table: TokenTable) -> Check:
    ids = table.text_ids
    count = len(ids) - len(table.canonical_ids())
    if not count:
        return Check("duplicates", "ok", "none")
    by_token: dict[bytes, list[int]] = defaultdict(list)
    for token_id, token in zip(ids.tolist(), filter(None, table.tokens()), strict=True):
        by_token[token].append(token_id)
    alike = (f"{quoted(escape(token))} {ids}" for token, ids in by_token.items() if len(ids) > 1)
    message = f"{count:,} ids have the same bytes as another id: {listed(alike)}"
    return Check("duplicates", "note", message)


def _round_trips(tokenizer: Tokenizer, advance: Callable[[int], object]) -> dict[str, list[int]]:
    """Return the ids that decoding and encoding changes, by cause."""
    tokens, texts = tokenizer.table.tokens(), dict[int, str]()
    causes: dict[str, list[int]] = defaultdict(list)
    for token_id, token in enumerate(tokens):
        text = utf8_text(token)
        if text is None:
            causes["part of a character"].append(token_id)
        elif text:
            texts[token_id] = text
    advance(sum(map(len, causes.values())))
    texts_left = iter(texts.items())
    while batch := dict(islice(texts_left, _TOKENS_AT_ONCE)):
        for token_id, spelled in zip(batch, tokenizer.library_ids([*batch.values()]), strict=True):
            if spelled != [token_id]:
                causes[_cause(tokenizer.table, token_id, spelled)].append(token_id)
        advance(len(batch))
    return dict(causes)


def _cause(table: TokenTable, token_id: int, spelled: Sequence[int]) -> str:
    if table.spell(spelled) != table[token_id]:
        return "the normalizer changes it"
    if table.types[token_id] == TokenType.BYTE:
        return "a byte token; the tokenizer uses another token for this character"
    return "another id has these bytes" if len(spelled) == 1 else "the tokenizer never emits it"


def _role_checks(tokenizer: Tokenizer) -> Iterator[Check]:
    table = tokenizer.table
    reserved = len(table.roles.get("reserved", ()))
    declared_by: dict[str, list[str]] = defaultdict(list)
    for role, ids in table.roles.items():
        for i in ids if role != "reserved" else ():
            who = tokenizer.declared.get(role, {}).get(i, "its name")
            declared_by[who].append(f"{role} {i} {table.shown(i)}")
    lines = [f"{len(table.control_names):,}, {reserved:,} of them reserved"]
    lines += [f"by {who}: {', '.join(tokens)}" for who, tokens in declared_by.items()]
    yield Check("special tokens", "ok", "\n".join(lines))
    eos, pad = table.roles.get("eos", ()), table.roles.get("pad", ())
    if eos:
        yield Check("eos", "ok", f"{', '.join(map(table.shown, eos))}, the end of documents")
    else:
        yield Check("eos", "failed", "none, so no token ends a document")
    problem = ""
    if not pad:
        problem = "none; before batching, set pad to an unused or reserved id"
    elif both := set(pad) & set(eos):
        problem = f"{table.shown(min(both))} is also eos, so a padding mask hides the ends of turns"
    shown = ", ".join(map(table.shown, pad))
    yield Check("pad", "warning" if problem else "ok", problem or shown)


def _probe_checks(tokenizer: Tokenizer) -> Iterator[Check]:
    texts = [*_PROBE.values(), _VARIANTS]
    decoded_texts = zip(texts, _decode(tokenizer, texts), strict=True)
    *by_kind, variant = [_difference(text.encode(), decoded) for text, decoded in decoded_texts]
    problems = [f"{kind}: {change}" for kind, change in zip(_PROBE, by_kind, strict=True) if change]
    if problems:
        yield Check(_PROBE_TEXT, "failed", "\n".join(["does not round-trip", *problems]))
    else:
        size = sum(len(text.encode()) for text in _PROBE.values())
        yield Check(_PROBE_TEXT, "ok", f"{size} bytes round-trip: {', '.join(_PROBE)}")
    if variant:
        level: Level = "warning" if tokenizer.text_changes else "failed"
        yield Check("Unicode variants", level, f"do not round-trip: {variant}")
    else:
        yield Check("Unicode variants", "ok", "all round-trip")


def _decode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[bytes]:
    return [tokenizer.table.spell(ids) for ids in tokenizer.library_ids(texts)]


def _difference(text: bytes, decoded: bytes) -> str:
    if text == decoded:
        return ""
    offset = num_common(text, decoded)
    while offset and text[offset : offset + 1] and text[offset] & 0xC0 == 0x80:
        offset -= 1
    excerpts = []
    for data in (text, decoded):
        part = data[offset : offset + 12]
        excerpts.append(quoted(escape(part.decode("utf-8", "ignore").encode() or part)))
    return " becomes ".join(excerpts)

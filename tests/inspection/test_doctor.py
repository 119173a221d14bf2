"""`doctor`: the checks of one tokenizer and of a pair, and its output."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase

import pytest
import small_tokenizers
from chat_families import CHAT
from checks import fits_80_columns, not_none, works
from conftest import REAL, Cli, Load
from make_tokenizers import byte_ranks, copy_folder, hf_folder_of_ranks, saved, word_piece
from tokenizers import Tokenizer as Rust
from tokenizers import decoders, models, normalizers, pre_tokenizers

import xtok
from xtok.config import ChatTemplates
from xtok.conversation import render, tool_suffix
from xtok.inspection.advice import WHEN_TO_DISTIL
from xtok.inspection.doctor import TokenizerDiagnosis, doctor
from xtok.inspection.results import Check
from xtok.tokenizers import Tokenizer, load_tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Like Qwen3's template, this template rewrites the messages before the last user message.
REWRITING = CHATML.replace(
    "{{ '<|im_start|>' + m.role", "{{ ('' if loop.last else 'earlier ') + '<|im_start|>' + m.role"
)


def student_template(template: str | None) -> ChatTemplates:
    return ChatTemplates(student_template=template)


def diagnose(tokenizer: Tokenizer, template: str | None = None) -> TokenizerDiagnosis:
    [diagnosis] = doctor(tokenizer, templates=student_template(template)).tokenizers
    return diagnosis


def check(diagnosis: TokenizerDiagnosis, name: str) -> Check:
    [named] = [c for c in diagnosis.checks if c.name == name]
    return named


def lost(diagnosis: TokenizerDiagnosis) -> dict[str, int]:
    return {**diagnosis.not_round_tripping}


def test_valid_tokenizer_has_no_failed_check(byte_level: Tokenizer) -> None:
    diagnosis = diagnose(byte_level, CHATML)
    levels = {c.name: c.level for c in diagnosis.checks}
    assert levels == {
        "backend": "ok", "normalizer": "ok", "width": "ok", "decode to nothing": "ok",
        "duplicates": "ok", "round trip": "note", "special tokens": "ok", "eos": "ok",
        "pad": "ok", "probe text": "ok", "Unicode variants": "ok", "chat template": "ok",
        "roles": "ok", "end of a turn": "ok", "prefix, tool message": "ok", "tool suffix": "ok",
        "prefix, user turn": "ok",
    }  # fmt: skip
    assert doctor(byte_level, templates=student_template(CHATML)).failed == ()
    assert check(diagnosis, "width").message == (
        "1,280 (from the config), largest id 1,199, 80 ids without a token"
    )
    assert check(diagnosis, "special tokens").message == (
        "5, 0 of them reserved\n"
        "by its name: turn_start 1196 <|im_start|>, turn_end 1197 <|im_end|>\n"
        "by the tokenizer: eos 1195 <|end_of_text|>, bos 1194 <|begin_of_text|>, pad 1198 <|pad|>\n"
        "by generation_config.json: eos 1197 <|im_end|>"
    )
    assert diagnosis.turn_ends == ("<|im_end|>",)
    ids = {name: i for i, name in byte_level.table.control_names.items()}
    suffix = not_none(diagnosis.tool_suffix_ids)
    assert suffix[1] == ids["<|im_start|>"]
    text = "".join(byte_level.table.name(i) for i in suffix)
    assert text == r"\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_rewrites_earlier_turns(byte_level: Tokenizer) -> None:
    diagnosis = diagnose(byte_level, REWRITING)
    tool = check(diagnosis, "prefix, tool message")
    assert tool.level == "warning"
    contents = [line.split(":")[0] for line in tool.message.split("\n")]
    assert contents == ["content present", "empty", "absent"]
    assert check(diagnosis, "prefix, user turn").level == "warning"
    assert doctor(byte_level, templates=student_template(REWRITING)).failed == ()
    assert doctor(byte_level, templates=student_template(REWRITING), tools=True).failed == (
        "small-byte-level: prefix, tool message",
    )
    assert doctor(byte_level, templates=student_template(CHATML), tools=True).failed == ()


TWO_ROLES = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('only two roles') }}{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
NOT_EOS = "{% for m in messages %}{{ m.role + m.content + '<|im_start|>' }}{% endfor %}"


def test_templates_that_refuse_a_role_or_end_turns_without_eos(byte_level: Tokenizer) -> None:
    """One model rejects a role and ends turns with text, the other with a token that is not eos."""
    diagnosis = diagnose(byte_level, TWO_ROLES)
    roles = check(diagnosis, "roles")
    assert roles.level == "note"
    assert roles.message.startswith("renders user, assistant\nsystem: the chat template of small-")
    assert "only two roles" in roles.message
    assert check(diagnosis, "end of a turn").level == "warning"
    assert check(diagnosis, "prefix, tool message").level == "note"
    end = check(diagnose(byte_level, NOT_EOS), "end of a turn")
    assert end.level == "warning"
    assert end.message.startswith("<|im_start|>, which is not eos, so generation does not stop")


def test_a_tokenizer_without_a_template(sentencepiece: Tokenizer) -> None:
    diagnosis = diagnose(sentencepiece)
    assert check(diagnosis, "chat template").level == check(diagnosis, "pad").level == "warning"
    assert lost(diagnosis)["part of a character"] == 128
    assert sum(lost(diagnosis).values()) > 128
    with_format = diagnose(sentencepiece, "mistral")
    assert check(with_format, "chat template").message == "the format mistral"
    assert with_format.turn_ends == ("</s>",)


def test_tokenizers_that_change_text(small: Path, tmp_path: Path) -> None:
    ranks, pattern = small / "small.tiktoken", small_tokenizers.tiktoken_pattern()
    nfkc, nfc = (
        diagnose(load_tokenizer(hf_folder_of_ranks(ranks, pattern, tmp_path / form, form)))
        for form in ("NFKC", "NFC")
    )
    assert check(nfkc, "normalizer").message.startswith("NFKC: ")
    probe = check(nfkc, "probe text")
    assert probe.level == "failed"
    assert "Chinese and Japanese: '，" in probe.message
    assert check(nfc, "probe text").level == "ok"
    assert check(nfc, "Unicode variants").level == "warning"
    pieces = diagnose(load_tokenizer(word_piece(tmp_path / "wp", lowercase=True)))
    assert check(pieces, "probe text").level == check(pieces, "eos").level == "failed"


def test_a_long_token_is_shown_with_its_length(tmp_path: Path) -> None:
    diagnosis = diagnose(byte_ranks(tmp_path / "long.tiktoken", "20" * 300))
    assert "20… (600 in all)'" in check(diagnosis, "round trip").message


def test_pad_that_is_eos(small: Path, tmp_path: Path) -> None:
    source = small / "small-byte-level"
    added = json.loads((source / "tokenizer.json").read_text())["added_tokens"]
    for token in added:
        token["content"] = token["content"].replace("<|pad|>", "<|other|>")
    config = {"pad_token": "<|end_of_text|>"}
    parts = {"tokenizer_config": config, "tokenizer": {"added_tokens": added}}
    pad = check(diagnose(load_tokenizer(copy_folder(source, tmp_path / "hf", **parts))), "pad")
    assert pad.level == "warning"
    assert pad.message.startswith("<|end_of_text|> is also eos")


def test_two_models(digits: Tokenizer, sentencepiece: Tokenizer) -> None:
    """If both models are the same, the model is checked only once."""
    diagnosis = doctor(digits, sentencepiece)
    pair = not_none(diagnosis.pair)
    assert (pair.student, pair.teacher) == ("small-digits", "small.model")
    assert not_none(diagnosis.advice).loss == "event KL"
    single, twice = doctor(digits), doctor(digits, digits)
    assert (single.pair, single.advice) == (None, None)
    assert twice.tokenizers == single.tokenizers
    assert not_none(twice.advice).loss == "plain KL"
    assert twice.summary.startswith("ok: small-digits → small-digits: no check failed, ")


def test_two_models_of_the_same_family(small: Path, digits: Tokenizer) -> None:
    """A wider matrix is padding; the report names an id with different tokens."""
    wide = load_tokenizer(small / "small-digits", vocab_size=1000)
    diagnosis = doctor(digits, wide)
    pair = not_none(diagnosis.pair)
    assert (pair.same, pair.num_ids, pair.differing) == (True, 800, 0)
    assert "first 800 columns" in not_none(diagnosis.advice).sentence
    other, names = copy.copy(digits), digits.table.control_names
    last = max(names)
    other.table = replace(digits.table, control_names={**names, last: "<|other|>"})
    other.vocabulary = replace(digits.vocabulary, table=other.table)
    facts = not_none(doctor(digits, other).pair)
    assert (facts.same, facts.differing) == (False, 1)
    assert facts.differing_examples == (f"{last} '{names[last]}' / '<|other|>'",)


def test_ends_of_turn_that_differ(tmp_path: Path, small: Path) -> None:
    """The base model ends with eos, the instruct model with another token; all ids are equal."""
    sides = []
    for name, eos in (("base", "<|end_of_text|>"), ("instruct", "<|im_end|>")):
        parts = {"tokenizer_config": {"eos_token": eos}, "generation_config": None}
        sides.append(copy_folder(small / "small-digits", tmp_path / name, **parts))
    [check] = doctor(*sides).pair_checks
    assert (check.name, check.level) == ("ends of turn", "warning")
    assert check.message.startswith(
        "the student's answers end with <|end_of_text|> (eos, not the turn_end <|im_end|>), the "
        "teacher's with <|im_end|> (eos), so the student does not learn to stop: "
    )
    [check] = doctor(sides[0], sides[0]).pair_checks
    assert check.level == "ok"


# On the command line


def test_doctor_at_80_columns(cli: Cli, small: Path) -> None:
    result = works(cli("doctor", small / "small-digits", small / "small.model"))
    lines = [line for line in result.stdout.splitlines() if not line.startswith("next: ")]
    assert fits_80_columns("\n".join(lines))
    assert "\x1b" not in result.stdout
    for expected in ("small-digits", "probe text", "a map between them", "next: xtok events"):
        assert expected in result.stdout
    assert cli("doctor", "bytes", "bytes", "bytes").returncode == 2


def test_doctor_exits_with_3(cli: Cli) -> None:
    result = cli("doctor", "bytes")
    assert result.returncode == 3
    first, *_, last = result.stdout.splitlines()
    assert first == "failed: bytes: 1 check failed (bytes: eos)"
    assert last == "failed: bytes: eos"


# On text


def test_shares_of_tokens_known_to_the_other_side(
    byte_level: Tokenizer, sentencepiece: Tokenizer, tmp_path: Path
) -> None:
    text = "The 201 steps.\nThe tea, the sea.\n"
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.jsonl").write_text(json.dumps({"body": text}) + "\n")
    texts = [tmp_path / "a.txt", tmp_path / "b.jsonl"]
    facts = not_none(not_none(doctor(byte_level, sentencepiece, texts, field="body").pair).text)
    sides = byte_level, sentencepiece
    for side, other, share in zip(sides, sides[::-1], facts.partner_shares, strict=True):
        tokens = [side.table[t] for t in side.library_ids([text])[0]]
        strings = other.table.canonical_ids().keys()
        assert share == sum(t in strings for t in tokens) / len(tokens)


# Real ones


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "partial", "total", "probe"),
    [
        ("mistral-v3.model", 128, 253, "ok"),
        ("claude-2", 753, 753, "failed"),  # it changes Chinese punctuation
        ("o200k.tiktoken", 1_562, 1_574, "ok"),
    ],
)
def test_real_tokens_not_round_tripping(
    load_real: Load, name: str, partial: int, total: int, probe: str
) -> None:
    diagnosis = diagnose(load_real(name))
    causes = lost(diagnosis)
    assert (causes["part of a character"], sum(causes.values())) == (partial, total)
    assert check(diagnosis, "probe text").level == probe
    assert ("'，" in check(diagnosis, "probe text").message) == (probe == "failed")


@pytest.mark.real
@pytest.mark.parametrize(
    ("template", "tokenizer", "tool", "user"),
    [
        ("qwen3", "qwen.tiktoken", "warning", "warning"),
        ("qwen3_training", "qwen.tiktoken", "ok", "ok"),
        ("qwen2_5", "qwen.tiktoken", "ok", "ok"),
        ("llama3_1", "llama3.tiktoken", "note", "ok"),
    ],
)
def test_prefixes_of_real_templates(
    load_real: Load, template: str, tokenizer: str, tool: str, user: str
) -> None:
    path = REAL / "chat-templates" / f"{template}.jinja"
    if not path.exists():
        pytest.skip("the templates are missing: run scripts/fetch_tokenizers.py")
    [diagnosis] = doctor(load_real(tokenizer), templates=student_template(str(path))).tokenizers
    assert check(diagnosis, "prefix, tool message").level == tool
    assert check(diagnosis, "prefix, user turn").level == user
    result = {"role": "tool", "name": "add", "tool_call_id": "a1B2c3D4e", "content": "4"}
    suffix = tool_suffix(load_real(tokenizer), [result], template=path)
    assert diagnosis.tool_suffix_ids == tuple(suffix.tolist())


def test_the_verdict_is_one_line(byte_level: Tokenizer, digits: Tokenizer) -> None:
    diagnosis = doctor(byte_level, digits)
    warnings = sum(c.level == "warning" for side in diagnosis.tokenizers for c in side.checks)
    assert not diagnosis.failed
    assert diagnosis.summary == (
        f"ok: small-byte-level → small-digits: no check failed, {warnings} warnings. "
        f"{not_none(diagnosis.advice).sentence} {WHEN_TO_DISTIL}"
    )


def test_the_first_rows_of_conversations(small: Path, tmp_path: Path) -> None:
    sides = []
    for name in ("small-digits", "small-byte-level"):
        folder = shutil.copytree(small / name, tmp_path / name)
        (folder / "chat_template.jinja").write_text(CHATML)
        sides.append(load_tokenizer(str(folder)))
    rows = [{"messages": CHAT, "mood": 1}, {"messages": [*CHAT, {**CHAT[0], "name": "Ada"}]}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    student, teacher = sides
    checks = [
        c for c in doctor(student, teacher, path).pair_checks if c.name.startswith("first rows")
    ]
    assert [c.level for c in checks] == ["note", "note", "ok"] * 2 + ["ok"]
    assert "2 conversations, 3 messages of user, 2 messages of assistant" in checks[2].message
    assert checks[2].message.endswith("tokens are targets: equal to the library's")
    assert checks[-1].message.startswith("100.0% of the targets are in a chunk")
    teacher.library.chat_template = "{{ bos_token }}" + CHATML  # a file that xtok does not read
    checks = [c for c in doctor(student, teacher, path).pair_checks if c.level == "warning"]
    assert "AutoTokenizer's [" in checks[0].message


def test_first_row_with_messages_of_the_teacher(small: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(small / "small-digits", tmp_path / "small-digits")
    (folder / "chat_template.jinja").write_text(CHATML)
    side = load_tokenizer(str(folder))
    own = [{"role": "system", "content": "There are 201."}, *CHAT]
    other = [CHAT[0], {**CHAT[1], "content": "There are 202 steps."}]
    rows: list[dict[str, object]] = [
        {"messages": CHAT}, {"messages": CHAT, "teacher_messages": own},
        {"messages": CHAT, "teacher_messages": other},
    ]  # fmt: skip
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    warning, count = (
        c for c in doctor(side, side, path).pair_checks if c.name == "teacher_messages"
    )
    assert warning.level == "warning"
    assert "line 3" in warning.message
    assert "at byte 12" in warning.message
    usual, longer = (len(render(side, chat).ids) for chat in (CHAT, own))
    assert count.message == (
        "1 of 3 conversations have teacher_messages; there, the teacher reads "
        f"{longer / usual:.1f} times as many tokens"
    )
    assert longer > 1.2 * usual


def test_text_requires_two_models(cli: Cli, byte_level: Tokenizer, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.touch()
    with pytest.raises(ValueError, match="two models"):
        doctor(byte_level, texts=text)
    assert cli("doctor", "bytes", "--text", text).returncode == 2


def test_an_uncased_tokenizer_on_one_side(
    byte_level: Tokenizer, digits: Tokenizer, tmp_path: Path
) -> None:
    """A third of a cased vocabulary has no row; the report of `build` contains the same note."""
    words = ["[PAD]", "[UNK]", *ascii_lowercase, *(f"##{letter}" for letter in ascii_lowercase)]
    rust = Rust(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    rust.normalizer = normalizers.BertNormalizer(lowercase=True)
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.decoder = decoders.WordPiece()
    folder = saved(tmp_path / "uncased", rust, unk_token="[UNK]", pad_token="[PAD]")
    texts = [token.decode("utf-8", "ignore") for token in byte_level.table.tokens()]
    upper = sum(text != text.lower() for text in texts)
    assert upper > 50
    message = f"{upper} of {len(byte_level.table.text_ids):,} tokens of small-byte-level have "
    message += "upper-case letters, but uncased is lower-case only: "

    def upper_case(student: Tokenizer | Path, teacher: Tokenizer | Path) -> list[str]:
        checks = doctor(student, teacher).pair_checks
        return [result.message for result in checks if result.name == "upper case"]

    for student, teacher, end in (
        (byte_level, folder, "their rows in a map are empty"),
        (folder, byte_level, "no row of a map contains them"),
    ):
        assert upper_case(student, teacher) == [message + end]
        assert message + end in xtok.build(student, teacher).reports[0].notes
    assert not upper_case(byte_level, digits)

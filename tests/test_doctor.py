"""What `doctor` and `overlap` say."""

from __future__ import annotations

import csv
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import REAL, Cli
from test_formats import word_piece
from test_tokenizers import hf_folder_of_ranks

from xtok.errors import OutputError, XtokError
from xtok.inspection import Check
from xtok.inspection.doctor import PROBE, TokenizerDiagnosis, doctor
from xtok.inspection.overlap import overlap, overlap_csv, plot_overlap
from xtok.inspection.text_facts import EventFacts, Shared, TextFacts, loss_on_text
from xtok.tokenizers import Tokenizer, load_tokenizer
from xtok.tokenizers._tiktoken import FAMILIES

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Like Qwen3: what stands before the last user's message is written another way.
REWRITING = CHATML.replace(
    "{{ '<|im_start|>' + m.role", "{{ ('' if loop.last else 'earlier ') + '<|im_start|>' + m.role"
)


def diagnose(tokenizer: Tokenizer, template: str | None = None) -> TokenizerDiagnosis:
    [found] = doctor([tokenizer], template=template).tokenizers
    return found


def check(found: TokenizerDiagnosis, name: str) -> Check:
    [one] = [c for c in found.checks if c.name == name]
    return one


def lost(found: TokenizerDiagnosis) -> dict[str, int]:
    return {one.cause: one.count for one in found.not_round_tripping}


def test_a_sound_tokenizer(byte_level: Tokenizer) -> None:
    found = diagnose(byte_level, CHATML)
    levels = {c.name: c.level for c in found.checks}
    assert levels == {
        "backend": "ok", "normalizer": "ok", "width": "ok", "decode to nothing": "ok",
        "duplicates": "ok", "round trip": "note", "special tokens": "ok", "eos": "ok",
        "pad": "ok", "probe text": "ok", "Unicode variants": "ok", "chat template": "ok",
        "roles": "ok", "end of a turn": "ok", "prefix, tool message": "ok", "tool suffix": "ok",
        "prefix, user turn": "ok",
    }  # fmt: skip
    assert doctor([byte_level], template=CHATML).failed == ()
    assert check(found, "width").message == (
        "1,280 (from the config), largest id 1,199, 80 ids without a token"
    )
    assert found.turn_ends == ("<|im_end|>",)
    ids = {name: i for i, name in byte_level.table.control_names.items()}
    suffix = found.tool_suffix_ids
    assert suffix is not None
    assert suffix[0] == ids["<|im_start|>"]
    text = "".join(byte_level.table.name(i) for i in suffix)
    assert text == r"<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_writes_earlier_turns_anew(byte_level: Tokenizer) -> None:
    found = diagnose(byte_level, REWRITING)
    tool = check(found, "prefix, tool message")
    assert tool.level == "failed"
    assert [line.split(":")[0] for line in tool.message.split("\n")] == [
        "content present",
        "empty",
        "absent",
    ]
    assert check(found, "prefix, user turn").level == "warning"
    assert found.tool_suffix_ids is None
    assert doctor([byte_level], template=REWRITING).failed == (
        "small-byte-level: prefix, tool message",
    )


def test_a_template_that_refuses_a_role_or_ends_a_turn_with_text(byte_level: Tokenizer) -> None:
    template = (
        "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}"
        "{{ raise_exception('only two roles') }}{% endif %}{{ m.role }}: {{ m.content }}\n"
        "{% endfor %}"
    )
    found = diagnose(byte_level, template)
    roles = check(found, "roles")
    assert roles.level == "note"
    assert roles.message.startswith("renders user, assistant\nsystem: the chat template of small-")
    assert "only two roles" in roles.message
    assert check(found, "end of a turn").level == "warning"
    assert check(found, "prefix, tool message").level == "note"


def test_an_end_of_turn_that_is_not_eos(byte_level: Tokenizer) -> None:
    template = "{% for m in messages %}{{ m.role + m.content + '<|im_start|>' }}{% endfor %}"
    end = check(diagnose(byte_level, template), "end of a turn")
    assert end.level == "warning"
    assert end.message.startswith("<|im_start|>, which is not eos: generation does not stop")


def test_a_tokenizer_without_a_template(sentencepiece: Tokenizer) -> None:
    found = diagnose(sentencepiece)
    assert check(found, "chat template").level == "warning"
    assert check(found, "pad").level == "warning"
    assert found.partial_utf8 == 128
    assert lost(found)["part of a character"] == 128
    assert sum(lost(found).values()) > 128
    with_format = diagnose(sentencepiece, "mistral")
    assert check(with_format, "chat template").message == "the format mistral"
    assert with_format.turn_ends == ("</s>",)


def test_what_normalizers_change_is_found(small: Path, tmp_path: Path) -> None:
    from small_tokenizers import tiktoken_pattern

    ranks = small / "small.tiktoken"
    folder = hf_folder_of_ranks(ranks, tiktoken_pattern(), tmp_path / "nfkc", "NFKC")
    found = diagnose(load_tokenizer(str(folder)))
    assert found.text_changes.keys() == {"NFKC"}
    probe = check(found, "probe text")
    assert probe.level == "failed"
    assert "Chinese and Japanese: '，" in probe.message
    folder = hf_folder_of_ranks(ranks, tiktoken_pattern(), tmp_path / "nfc", "NFC")
    found = diagnose(load_tokenizer(str(folder)))
    assert check(found, "probe text").level == "ok"
    assert check(found, "Unicode variants").level == "warning"


def test_word_piece_fails(tmp_path: Path) -> None:
    found = diagnose(load_tokenizer(str(word_piece(tmp_path / "wp", lowercase=True))))
    assert check(found, "probe text").level == "failed"
    assert check(found, "eos").level == "failed"


def test_pad_that_is_eos(small: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    shutil.copytree(small / "small-byte-level", folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["pad_token"] = config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    document = json.loads((folder / "tokenizer.json").read_text())
    for token in document["added_tokens"]:
        token["content"] = token["content"].replace("<|pad|>", "<|other|>")
    (folder / "tokenizer.json").write_text(json.dumps(document))
    pad = check(diagnose(load_tokenizer(str(folder))), "pad")
    assert pad.level == "warning"
    assert pad.message.startswith("<|end_of_text|> is eos as well")


def test_the_probe_has_all_kinds() -> None:
    text = "".join(PROBE.values())
    for sign in "éßМφהةภ등灯，の🌊":
        assert sign in text, sign
    for space in "\t\n\r\u00a0\u2003\u200b\u3000":
        assert space in text
    assert "\u200d" in text
    assert "  " in text


def test_two_models(digits: Tokenizer, sentencepiece: Tokenizer) -> None:
    pair = doctor([digits, sentencepiece]).pair
    assert pair is not None
    assert (pair.student, pair.teacher) == ("small-digits", "small.model")
    assert pair.numerals > 0
    assert pair.numerals_shared == 0
    assert pair.digits[1] == 1
    assert (pair.loss, pair.why.split()[-4:]) == ("P-KL", ["have", "no", "exact", "counterpart"])
    assert "turn_start" in pair.roles_without_counterpart
    assert doctor([digits, digits]).pair is not None
    same = doctor([digits, digits]).pair
    assert same is not None
    assert (same.loss, same.student_share) == ("plain KL", 1.0)
    assert doctor([digits]).pair is doctor([digits] * 3).pair is None


# On the command line


def test_doctor_at_80_columns(cli: Cli, small: Path) -> None:
    done = cli("doctor", small / "small-digits", small / "small.model")
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "\x1b" not in done.stdout
    for expected in ("small-digits", "probe text", "a map between them", "loss that suits"):
        assert expected in done.stdout


def test_doctor_exits_with_3_and_prints_json(cli: Cli, small: Path) -> None:
    done = cli("doctor", "bytes", "--json")
    assert done.returncode == 3
    found = json.loads(done.stdout)
    assert found["pair"] is None
    [one] = found["tokenizers"]
    failed = [c["name"] for c in one["checks"] if c["level"] == "failed"]
    assert failed == ["eos"]
    assert one["model_id"] == "bytes"
    done = cli("doctor", "bytes")
    assert done.returncode == 3
    assert done.stdout.splitlines()[0] == "failed: bytes: 1 check failed (bytes: eos)"
    assert done.stdout.splitlines()[-1] == "failed: bytes: eos"


def test_doctor_with_a_bad_template(cli: Cli, small: Path) -> None:
    done = cli("doctor", small / "small.model", "--chat-template", "no.jinja")
    assert done.returncode == 1
    assert "error: the chat template no.jinja cannot be read: No such file or dir" in done.stderr


# overlap


def test_overlap(byte_level: Tokenizer, digits: Tokenizer, sentencepiece: Tokenizer) -> None:
    tokenizers = [byte_level, digits, sentencepiece]
    found = overlap(tokenizers)
    assert found.model_ids == ("small-byte-level", "small-digits", "small.model")
    naive = [{t for t in one.table.tokens() if t} for one in tokenizers]
    for i, a in enumerate(naive):
        for j, b in enumerate(naive):
            assert found.counts[i][j] == len(a & b)
            assert found.shares[i][j] == len(a & b) / len(a)
    assert found.sizes == tuple(map(len, naive))
    rows = list(csv.DictReader(overlap_csv(found).splitlines()))
    assert len(rows) == 9
    assert rows[1]["other"] == "small-digits"
    assert int(rows[1]["shared"]) == found.counts[0][1]
    assert float(rows[1]["share"]) == pytest.approx(found.shares[0][1], abs=1e-6)


def test_overlap_on_the_command_line(cli: Cli, small: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    models = [small / "small-byte-level", small / "small-digits", small / "small.model", "bytes"]
    done = cli("overlap", *models, "--plot", "overlap.png")
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "100.0%" in done.stdout
    assert "note: the plot is overlap.png\n" in done.stderr
    data = (tmp_path / "overlap.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    narrow = cli("overlap", *models, env={"COLUMNS": "40"}).stdout
    assert narrow.count("│ 1 small") == len(models)  # a table for each column
    as_json = json.loads(cli("overlap", *models, "--json").stdout)
    assert as_json["sizes"][-1] == 256
    assert np.array(as_json["counts"]).shape == (4, 4)
    lines = cli("overlap", *models, "--csv").stdout.splitlines()
    assert lines[0] == "model,other,size,other_size,shared,share"
    assert len(lines) == 17
    assert cli("overlap", "bytes", "--csv", "--json").returncode == 2


TEXT = "The 201 steps.\nThe tea, the sea.\n"


def test_overlap_on_text(
    byte_level: Tokenizer, digits: Tokenizer, sentencepiece: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.jsonl").write_text(json.dumps({"body": TEXT}) + "\n")
    tokenizers = [byte_level, digits, sentencepiece]
    found = overlap(tokenizers, [tmp_path / "a.txt", tmp_path / "b.jsonl"], field="body")
    assert found.counts == overlap(tokenizers).counts
    assert found.text is not None
    assert (found.text.num_documents, found.text.num_bytes) == (2, 2 * len(TEXT))
    for i, one in enumerate(tokenizers):
        tokens = [one.table[t] for t in one.library_ids([TEXT])[0]]
        assert found.text.num_tokens[i] == 2 * len(tokens)
        for j, other in enumerate(tokenizers):
            shared = sum(token in other.table.canonical_ids() for token in tokens)
            assert found.text.shares[i][j] == shared / len(tokens)
    assert [found.text.shares[i][i] for i in range(3)] == [1, 1, 1]
    assert found.text.shares[0][1] != found.shares[0][1]
    rows = list(csv.DictReader(overlap_csv(found).splitlines()))
    assert rows[1]["text_tokens"] == str(found.text.num_tokens[0])
    assert float(rows[1]["text_share"]) == pytest.approx(found.text.shares[0][1], abs=1e-6)


def test_overlap_on_no_text(byte_level: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(XtokError) as caught:
        overlap([byte_level], tmp_path / "a.txt")
    assert caught.value.message == (
        "small-byte-level makes no tokens of 0 documents, 0 bytes of text"
    )
    with pytest.raises(XtokError, match=r"there is no file .*none\.txt"):
        overlap("./no-model", tmp_path / "none.txt")


def test_overlap_on_text_on_the_command_line(cli: Cli, small: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    models = [small / "small-byte-level", small / "small.model"]
    done = cli("overlap", *models, "--text", "a.txt")
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert done.stdout.count("│ 1 small-byte-level") == 2  # the vocabularies, and the text
    assert f"On the text, {len(TEXT)} bytes" in done.stdout
    as_json = json.loads(cli("overlap", *models, "--text", "a.txt", "--json").stdout)
    assert as_json["text"]["shares"][0][0] == 1
    assert json.loads(cli("overlap", *models, "--json").stdout)["text"] is None
    lines = cli("overlap", *models, "--text", "a.txt", "--csv").stdout.splitlines()
    assert lines[0] == "model,other,size,other_size,shared,share,text_tokens,text_share"
    done = cli("overlap", "./none.model", "--text", "none.txt")
    assert "error: there is no file none.txt" in done.stderr  # before a model is loaded
    done = cli("overlap", *models, "--field", "body")
    assert (done.returncode, "--field goes with --text" in done.stderr) == (2, True)


def test_a_plot_of_any_names(byte_level: Tokenizer, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = replace(overlap([byte_level]), model_ids=("a$\\x$_b",))
    plot_overlap(found, tmp_path / "x.svg")
    assert (tmp_path / "x.svg").stat().st_size > 1000


def test_a_plot_on_a_full_disk_leaves_nothing(byte_level: Tokenizer, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "x.png"
    path.write_bytes(b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OutputError, match=r"x\.png cannot be written: File too large"):
            plot_overlap(overlap([byte_level]), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x.png"]


def test_a_plot_that_cannot_be_written_is_known_at_once(cli: Cli) -> None:
    for name, message in (
        ("x.txt", "the plot x.txt does not end in .png or .svg or .pdf"),
        ("/dev/null/x.png", "the folder of the plot, /dev/null, is a file"),
    ):
        done = cli("overlap", "./none.model", "--plot", name)
        assert done.returncode == 1
        assert message in done.stderr


# Real ones


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "partial", "total"),
    [
        ("llama3.tiktoken", 1_352, 1_352),
        ("mistral-v3.model", 128, 253),
        ("deepseek-v3", 1_470, 1_470),
        ("claude-2", 753, 753),
        ("o200k.tiktoken", 1_562, 1_574),
    ],
)
def test_real_tokens_not_round_tripping(
    load_real: Callable[[str], Tokenizer], name: str, partial: int, total: int
) -> None:
    found = diagnose(load_real(name))
    assert (found.partial_utf8, sum(lost(found).values())) == (partial, total)


@pytest.mark.real
def test_qwen_with_its_normalizer(real: Callable[[str], str], tmp_path: Path) -> None:
    [family] = [f for f in FAMILIES.values() if "<|im_start|>" in f.control]
    added: list[Any] = [(n, True) for n in family.control] + [(n, False) for n in family.text]
    path = Path(real("qwen.tiktoken"))
    folder = hf_folder_of_ranks(path, family.pattern, tmp_path / "qwen", "NFC", added)
    found = diagnose(load_tokenizer(str(folder)))
    assert found.partial_utf8 == 1_448
    assert sum(lost(found).values()) == 3_357
    assert check(found, "probe text").level == "ok"
    assert check(found, "Unicode variants").level == "warning"


@pytest.mark.real
def test_claude_2_changes_chinese_punctuation(load_real: Callable[[str], Tokenizer]) -> None:
    probe = check(diagnose(load_real("claude-2")), "probe text")
    assert probe.level == "failed"
    assert "'，" in probe.message


@pytest.mark.real
@pytest.mark.parametrize(
    ("template", "tokenizer", "tool", "user"),
    [
        ("qwen3", "qwen.tiktoken", "failed", "warning"),
        ("qwen3_training", "qwen.tiktoken", "ok", "ok"),
        ("qwen2_5", "qwen.tiktoken", "ok", "ok"),
        ("llama3_1", "llama3.tiktoken", "ok", "ok"),
    ],
)
def test_real_templates_keep_what_they_wrote(
    load_real: Callable[[str], Tokenizer], template: str, tokenizer: str, tool: str, user: str
) -> None:
    path = REAL / "chat-templates" / f"{template}.jinja"
    if not path.exists():
        pytest.skip("the templates are not there: run scripts/fetch_tokenizers.py")
    [found] = doctor([load_real(tokenizer)], template=path).tokenizers
    assert check(found, "prefix, tool message").level == tool
    assert check(found, "prefix, user turn").level == user
    assert (found.tool_suffix_ids is not None) == (tool == "ok")


def test_the_verdict_is_one_line(byte_level: Tokenizer, digits: Tokenizer) -> None:
    found = doctor([byte_level, digits])
    assert found.pair is not None
    warnings = sum(c.level == "warning" for one in found.tokenizers for c in one.checks)
    assert not found.failed
    assert found.verdict == (
        f"ok: small-byte-level → small-digits: no check failed, {warnings} warnings; "
        f"{found.pair.loss} suits: {found.pair.why}"
    )


def test_text_measures_both_directions_and_the_events(
    byte_level: Tokenizer, digits: Tokenizer, tmp_path: Path
) -> None:
    """Digits have a token for numbers of two digits and more; bytes read them one by one."""
    text = tmp_path / "text.txt"
    text.write_text("1 20 30 12 " * 40, encoding="utf-8")
    there, back = (doctor(pair, text).pair for pair in ([byte_level, digits], [digits, byte_level]))
    assert there is not None
    assert back is not None
    assert there.text is not None
    assert back.text is not None
    assert there.text.open_bits == back.text.open_bits[::-1]
    assert there.text.open_bits[0] > there.text.open_bits[1] == 0
    assert there.events == back.events
    assert there.loss == "event KL"
    assert "of maps, that for teacher-to-student KL: student → teacher leaves" in there.why
    assert "of maps, that for P-KL: student → teacher leaves 0.00 bits open" in back.why


def test_events_that_leak_too_much_are_not_recommended() -> None:
    text = TextFacts(
        files=("a",),
        num_bytes=9,
        tokens=Shared(student=3, teacher=3, both=1),
        boundaries=3,
        leak=0.3,
        bits=(1.0, 1.0),
        open_bits=(0.5, 0.25),
    )
    loss, why = loss_on_text(text, EventFacts(num_events=2, leak=0.06, kept=1.0))
    assert loss == "teacher-to-student KL"
    assert why == (
        "student → teacher leaves 0.50 bits open, teacher → student 0.25; events leak at 6.0% of "
        "the text's shared boundaries, shared tokens and a rest at 30.0%, unless xtok events "
        "--text merges them"
    )


def test_text_goes_with_a_student_and_a_teacher(
    cli: Cli, small: Path, byte_level: Tokenizer, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("1", encoding="utf-8")
    with pytest.raises(ValueError, match="texts go with two models, not 1"):
        doctor(byte_level, text)
    model = str(small / "small-digits")
    done = cli("doctor", model, "--text", str(text))
    assert done.returncode == 2
    assert "--text goes with two models, a student and a teacher" in done.stderr
    text.write_text("", encoding="utf-8")
    done = cli("doctor", model, str(small / "small-byte-level"), "--text", str(text))
    assert done.returncode == 1
    assert done.stderr.startswith("error: nothing can be measured: 0 documents, 0 bytes of text\n")


@pytest.mark.real
def test_real_pair(load_real: Callable[[str], Tokenizer]) -> None:
    pair = doctor([load_real("llama3.tiktoken"), load_real("qwen.tiktoken")]).pair
    assert pair is not None
    assert pair.shared == 109_566
    assert (pair.numerals, pair.numerals_shared, pair.digits) == (1_100, 0, (3, 1))
    assert pair.loss == "P-KL"
    found = overlap([load_real("llama3.tiktoken"), load_real("qwen.tiktoken")])
    assert found.counts[0][1] == 109_566

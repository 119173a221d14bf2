"""Folders of all layouts without a tokenizer.json are read like AutoTokenizer reads them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from make_tokenizers import copy_folder, unigram_model
from random_texts import texts
from small_tokenizers import CORPUS, byte_level_bpe
from tokenizers import AddedToken, normalizers
from tokenizers import Tokenizer as Rust
from transformers import AutoTokenizer

import xtok
from xtok.errors import TokenizerError
from xtok.inspection.doctor import doctor
from xtok.tokenizers import Tokenizer, load_tokenizer
from xtok.tokenizers.table import TokenType

SPECIAL = ("<|im_start|>", "<|im_end|>")
ADDED = {name: 1000 + i for i, name in enumerate(SPECIAL)}
LISTED = {
    str(i): {
        "content": name, "special": name == "<|im_end|>", "lstrip": False, "rstrip": False,
        "normalized": False, "single_word": False,
    }
    for name, i in ADDED.items()
}  # fmt: skip
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
LLAMA = {"tokenizer_class": "LlamaTokenizer", **NAMED}


@pytest.fixture(scope="module")
def vocabularies(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of vocabularies: SentencePiece, with and without bytes; GPT-2's two; BERT's."""
    folder = tmp_path_factory.mktemp("vocabularies")
    shutil.copy(small / "small.model", folder / "bpe")
    t5: dict[str, Any] = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    for name, options in {"unigram": {}, "t5": t5, "bytes": {**t5, "byte_fallback": True}}.items():
        (folder / name).write_bytes(unigram_model(character_coverage=0.98, **options))
    model = json.loads((small / "small-byte-level" / "tokenizer.json").read_text())["model"]
    vocab = {**model["vocab"], "<|endoftext|>": 1194, "<s>": 1195, "</s>": 1196}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    merges = "".join(f"{' '.join(merge)}\n" for merge in model["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "of", ",", ".", "The"]
    letters = [chr(i) for i in range(ord("a"), ord("z") + 1)]
    words += [*letters, *(f"##{letter}" for letter in letters), "2", "##0", "##4"]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    return folder


@pytest.fixture
def write(vocabularies: Path, tmp_path: Path) -> Write:
    def folder_of(layout: Layout | str, name: str = "model") -> Path:
        files, configs = LAYOUTS[layout] if isinstance(layout, str) else layout
        folder = tmp_path / name
        folder.mkdir()
        for file, source in files.items():
            shutil.copy(vocabularies / source, folder / file)
        for stem, content in configs.items():
            (folder / f"{stem}.json").write_text(json.dumps(content))
        return folder

    return folder_of


Layout = tuple[dict[str, str], dict[str, Any]]
Write = Callable[..., Path]
BPE = {"tokenizer.model": "bpe"}
WIDE = {"model_type": "llama", "vocab_size": 1024}
GPT2 = {"vocab.json": "vocab.json", "merges.txt": "merges.txt"}


def spm(name: str, tokenizer_class: str | None, model_type: str, **config: Any) -> Layout:
    """Write a SentencePiece file under a name that a class of Transformers expects."""
    named = {} if tokenizer_class is None else {"tokenizer_class": tokenizer_class}
    model = {"model_type": model_type, "vocab_size": 1024}
    source = {"tokenizer.model": "bpe", "spiece.model": "t5"}.get(name, "unigram")
    if config.pop("of_bytes", False):
        source = "bytes"
    return {name: source}, {"tokenizer_config": named | config, "config": model}


def llama(model_type: str = "llama", **config: Any) -> Layout:
    return spm("tokenizer.model", "LlamaTokenizer", model_type, **NAMED | config)


LAYOUTS: dict[str, Layout] = {
    "a file alone": (BPE, {}),
    "a file and config.json": (BPE, {"config": WIDE}),
    "a file and a class": (BPE, {"tokenizer_config": LLAMA}),
    "legacy": llama(legacy=True),
    "not legacy": llama(legacy=False),
    "legacy not said": llama(),
    "mistral": llama("mistral"),
    "mistral, legacy": llama("mistral", legacy=True),
    "mistral, not legacy": llama("mistral", legacy=False),
    "no prefix": llama(add_prefix_space=False),
    "a prefix": llama(add_prefix_space=True),
    "the general class": spm("tokenizer.model", "PreTrainedTokenizerFast", "llama", **NAMED),
    "gemma": spm("tokenizer.model", "GemmaTokenizer", "gemma"),
    "no class": spm("tokenizer.model", None, "llama", **NAMED),
    "added_tokens.json": (BPE, {
        "config": WIDE, "added_tokens": ADDED,
        "tokenizer_config": {**LLAMA, "eos_token": "<|im_end|>", "legacy": False}}),
    "special_tokens_map.json": (BPE, {
        "config": WIDE, "added_tokens": ADDED, "tokenizer_config": LLAMA,
        "special_tokens_map": {
            **NAMED, "pad_token": {**LISTED["1001"], "content": "<|im_start|>"},
            "additional_special_tokens": ["<|im_end|>", "<extra>"]}}),
    "tokens in the config": llama(
        pad_token="<pad>", additional_special_tokens=["<|im_start|>", "<|im_end|>"]),
    "tokens of a model's own": llama(
        image_token="<image>", extra_special_tokens={"audio_token": "<audio>"}),
    "added_tokens_decoder": llama(added_tokens_decoder=LISTED),
    "xlm-r": spm("sentencepiece.bpe.model", "XLMRobertaTokenizer", "xlm-roberta"),
    "xlm-r, no class": spm("sentencepiece.bpe.model", None, "xlm-roberta"),
    "mbart": spm("sentencepiece.bpe.model", "MBartTokenizer", "mbart"),
    "mbart 50": spm("sentencepiece.bpe.model", "MBart50Tokenizer", "mbart"),
    "nllb": spm("sentencepiece.bpe.model", "NllbTokenizer", "m2m_100"),
    "camembert": spm("sentencepiece.bpe.model", "CamembertTokenizer", "camembert"),
    "t5": spm("spiece.model", "T5Tokenizer", "t5"),
    "t5, 3 extra ids": spm("spiece.model", "T5Tokenizer", "t5", extra_ids=3),
    "t5, extra ids listed": spm(
        "spiece.model", "T5Tokenizer", "t5", extra_ids=2,
        additional_special_tokens=["<extra_id_0>", "<extra_id_1>"]),
    "xlnet": spm("spiece.model", "XLNetTokenizer", "xlnet"),
    "big bird": spm("spiece.model", "BigBirdTokenizer", "big_bird"),
    "deberta 2": spm("spm.model", "DebertaV2Tokenizer", "deberta-v2"),
    "t5 over bytes": spm("spiece.model", "T5Tokenizer", "t5", of_bytes=True),
    "deberta 2 over bytes": spm("spm.model", "DebertaV2Tokenizer", "deberta-v2", of_bytes=True),
    "gpt 2": (GPT2, {"config": {"model_type": "gpt2", "vocab_size": 1197}}),
    "gpt 2, a prefix": (GPT2, {
        "config": {"model_type": "gpt2", "vocab_size": 1197},
        "tokenizer_config": {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}}),
    "roberta": (GPT2, {"config": {"model_type": "roberta", "vocab_size": 1300}}),
    "roberta, a prefix": (GPT2, {
        "config": {"model_type": "roberta", "vocab_size": 1300},
        "tokenizer_config": {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": True}}),
    "mbart, special tokens split": spm(
        "sentencepiece.bpe.model", "MBartTokenizer", "mbart", split_special_tokens=True),
    "qwen 2": (GPT2, {
        "config": {"model_type": "qwen2", "vocab_size": 1300}, "added_tokens": {"<tool>": 1197},
        "tokenizer_config": {"tokenizer_class": "Qwen2Tokenizer"}}),
    "bert": ({"vocab.txt": "vocab.txt"}, {"config": {"model_type": "bert", "vocab_size": 80}}),
    "bert, cased": ({"vocab.txt": "vocab.txt"}, {
        "config": {"model_type": "bert", "vocab_size": 80},
        "tokenizer_config": {"tokenizer_class": "BertTokenizer", "do_lower_case": False}}),
}  # fmt: skip


def assert_as_the_library(ours: Tokenizer, auto: Any) -> None:
    """Compare ids, special tokens and roles with AutoTokenizer's; check bytes and spans."""
    table = ours.table
    added = auto.added_tokens_decoder
    special = {i: token.content for i, token in added.items() if token.special}
    assert special.items() <= table.control_names.items()
    assert ours.special_token_names == auto.special_tokens_map
    for role, name in ours.special_token_names.items():
        # Byte-level tokenizers declare an unknown token, but never return it.
        if role in ("bos_token", "eos_token", "pad_token", "mask_token", "sep_token", "cls_token"):
            i = auto.convert_tokens_to_ids(name)
            assert i in table.roles[role.removesuffix("_token")]
    assert ours.vocabulary.tokenizer_vocab_size == max(auto.get_vocab().values()) + 1
    own = f"{SPECIAL[0]}user\n{CORPUS[0][:40]}{SPECIAL[1]} </s>a <s>b<pad>[INST] c<extra_id_0>"
    samples = [own, "", " ", "  a  b\n\nc ", *texts(ours, num_texts=100)]
    expected = [list(ids) for ids in auto(samples, add_special_tokens=False)["input_ids"]]
    assert ours.encode_batch(samples) == expected
    for text, ids in zip(samples, expected, strict=True):
        encoding, data = ours.encode(text), text.encode()
        assert encoding.ids.tolist() == ids
        bounds = encoding.bounds.tolist()
        assert bounds == sorted(bounds)
        assert bounds[0] == (0 if ids else len(data))
        assert bounds[-1] == len(data)
        for i, start, end in zip(ids, bounds, bounds[1:], strict=False):
            if i in special and table.types[i] == TokenType.CONTROL:
                assert special[i].encode() in data[start:end]
            elif not encoding.num_changed:
                assert data[start:end].strip() == (table[i] or b"").strip()
    for word in (" the", "lighthouse", " 2024,", *(f" {word}" for word in CORPUS[0].split()[:20])):
        [pieces] = ours.segment_batch([word.encode()])
        assert pieces is None or b"".join([table[i] for i in pieces]) == word.encode()


@pytest.mark.filterwarnings("ignore:Deprecated in 0.9.0")  # of older versions of tokenizers
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_folder_is_read_as_autotokenizer_reads_it(write: Write, name: str) -> None:
    folder = write(name)
    assert_as_the_library(load_tokenizer(folder), AutoTokenizer.from_pretrained(str(folder)))


def test_a_prefix_after_control_tokens_has_no_bytes(write: Write) -> None:
    tokenizer = load_tokenizer(write("roberta, a prefix"))
    for parts in (["<s>", "a", "</s>", "b"], ["é", "<pad>", "é", "<s>", "\n\n", "<s>"]):
        text = "".join(parts)
        encoding, data = tokenizer.encode(text), text.encode()
        stretches = [data[a:b].decode() for a, b in pairwise(encoding.bounds.tolist())]
        assert [stretch for stretch in stretches if stretch] == parts
        assert not encoding.num_changed


@pytest.mark.parametrize("layout", ["a file alone", llama(legacy=True)])
def test_segments_of_a_folder_have_no_prefix(
    write: Write, sentencepiece: Tokenizer, layout: Layout | str
) -> None:
    folder = load_tokenizer(write(layout))
    assert not folder.text_changes
    for text in (" the words", "the words", "  two\n", CORPUS[3]):
        assert folder.library_ids([text]) == sentencepiece.library_ids([text])


@pytest.mark.parametrize(
    "layout",
    [
        spm("other.model", "T5Tokenizer", "t5"),
        ({"vocab.txt": "vocab.txt"}, {"config": {"model_type": "llama", "vocab_size": 80}}),
    ],
)
def test_a_file_that_the_class_does_not_read_is_named(write: Write, layout: Layout) -> None:
    [name] = layout[0]
    with pytest.raises(TokenizerError) as error:
        load_tokenizer(write(layout))
    assert name in str(error.value)


# With a tokenizer.json


def backend_notes(folder: Path) -> list[str]:
    [diagnosis] = doctor(folder).tokenizers
    return [check.message for check in diagnosis.checks if check.name == "backend"][1:]


def test_doctor_reports_files_that_the_library_reads_differently(
    small: Path, tmp_path: Path
) -> None:
    split = byte_level_bpe(tmp_path / "split", vocab_size=1200, digits=3)
    parts = {
        "tokenizer_config": {"tokenizer_class": "GPT2Tokenizer"},
        "config": {"model_type": "gpt2"},
    }
    folder = copy_folder(split, tmp_path / "gpt2", **parts)
    tokenizer, auto = load_tokenizer(folder), AutoTokenizer.from_pretrained(str(folder))
    single_file = shutil.copy(folder / "tokenizer.json", tmp_path / "alone.json")
    text = "2024"
    assert tokenizer.encode(text).ids.tolist() == auto(text, add_special_tokens=False)["input_ids"]
    assert (
        tokenizer.encode(text).ids.tolist() != load_tokenizer(single_file).encode(text).ids.tolist()
    )
    [note] = backend_notes(folder)
    assert note.startswith("tokenizer.json alone returns other ids for ")
    assert not backend_notes(small / "small-digits")


def test_doctor_compares_folders_with_their_file(write: Write) -> None:
    for name, file in {"xlm-r": "sentencepiece.bpe.model", "legacy": "tokenizer.model"}.items():
        [note] = backend_notes(write(name, name))
        assert note.startswith(f"{file} alone returns other ids for ")


def test_added_tokens_that_a_normalizer_makes_the_same_are_noted(
    small: Path, tmp_path: Path
) -> None:
    rust = Rust.from_file(str(small / "small-digits" / "tokenizer.json"))
    rust.normalizer = normalizers.Lowercase()
    rust.add_tokens([AddedToken(name, normalized=True) for name in ("Hello", "other")])
    rust.save(str(tmp_path / "tokenizer.json"))
    assert not load_tokenizer(tmp_path).notes
    rust.add_tokens([AddedToken("hello", normalized=True)])
    rust.save(str(tmp_path / "tokenizer.json"))
    [note] = load_tokenizer(tmp_path).notes
    assert "equal after normalization: 'Hello', 'hello'" in note


def test_a_dropout_is_turned_off_and_noted(small: Path, tmp_path: Path, digits: Tokenizer) -> None:
    model = json.loads((small / "small-digits" / "tokenizer.json").read_text())["model"]
    parts = {"model": {**model, "dropout": 0.5}}
    folder = copy_folder(small / "small-digits", tmp_path / "dropout", tokenizer=parts)
    auto = AutoTokenizer.from_pretrained(str(folder))
    for source in (folder, folder / "tokenizer.json", auto):
        tokenizer = load_tokenizer(source)
        assert tokenizer.encode_batch(CORPUS) == digits.encode_batch(CORPUS)
        assert ["dropout of 0.5" in note for note in tokenizer.notes] == [True]
    assert auto.backend_tokenizer.model.dropout == 0.5  # the argument is unchanged
    assert ["dropout" in note for note in backend_notes(folder)] == [True]


# More ids than the model has rows


@pytest.fixture(scope="module")
def narrow(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("narrow") / "model"
    return copy_folder(small / "small-digits", folder, config={"vocab_size": 798})


def test_a_model_of_fewer_rows_than_ids(narrow: Path, digits: Tokenizer) -> None:
    tokenizer = load_tokenizer(narrow)
    vocabulary = tokenizer.vocabulary
    assert (vocabulary.vocab_size, vocabulary.tokenizer_vocab_size) == (798, 798)
    assert vocabulary.width_source == "config"
    [note] = tokenizer.notes
    assert "'<|pad|>' (id 798), '<think>' (id 799)" in note
    assert note in backend_notes(narrow)
    assert tokenizer.table.tokens() == digits.table.tokens()[:798]
    assert "pad" not in tokenizer.table.roles
    assert tokenizer.special_token_names["pad_token"] == "<|pad|>"
    assert tokenizer.encode_batch(CORPUS) == digits.encode_batch(CORPUS)
    for text in ("a <think> b", "<|pad|>"):
        for encodes in (tokenizer.encode, lambda text: tokenizer.encode_batch(["a", text])):
            with pytest.raises(TokenizerError, match=r"798 logits"):
                encodes(text)
        spelled = tokenizer.segment(text)
        assert [spelled] == tokenizer.library_ids([text])
        assert [spelled] == [ids.tolist() for ids in tokenizer.library_arrays([text])]
        assert max(spelled) < 798
        assert b"".join([tokenizer.table[i] for i in spelled]) == text.encode()
    raw = tokenizer.table_as("raw", ignore=[5])
    assert (len(raw), raw[5]) == (798, b"")


def test_other_widths_of_a_narrow_model(narrow: Path, digits: Tokenizer) -> None:
    tokenizer = load_tokenizer(narrow)
    wide = tokenizer.at_width(900)
    assert wide.table.sha256() == digits.table.sha256()
    assert not wide.notes
    assert wide.at_width(798).table.sha256() == tokenizer.table.sha256()
    assert load_tokenizer(narrow, vocab_size=799).table.control_names[798] == "<|pad|>"
    with pytest.raises(TokenizerError) as error:
        load_tokenizer(narrow, vocab_size=600)  # of another model
    assert error.value.parameter == "vocab_size"


def test_maps_events_and_losses_of_a_narrow_model(narrow: Path, byte_level: Tokenizer) -> None:
    import torch

    student = load_tokenizer(narrow)
    projection = xtok.build(student, byte_level)
    assert projection.shape == (798, 1280)
    back = xtok.build(byte_level, student)
    assert back.teacher_ids.max() < 798
    events = xtok.events(student, byte_level)
    assert (events.student.vocab_size, events.teacher.vocab_size) == (798, 1280)
    module = xtok.ProjectionModule(projection)
    assert module(torch.full((2, 798), 1 / 798)).shape == (2, 1280)
    collator = xtok.DistillationCollator(student, byte_level)
    batch = collator(["the words of 2024", "two"])
    assert batch["input_ids"].max() < 798
    with pytest.raises(TokenizerError, match="<think>"):
        collator(["the <think>"])

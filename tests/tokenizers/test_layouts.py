"""Folders of every layout, without a tokenizer.json: read as AutoTokenizer reads them."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from make import check, texts
from small_tokenizers import CORPUS
from transformers import AutoTokenizer

from xtok.errors import TokenizerError
from xtok.inspection.doctor import doctor
from xtok.tokenizers import Tokenizer, load_tokenizer

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
UNIGRAM = dict.fromkeys(("spiece.model", "sentencepiece.bpe.model", "spm.model"), "unigram")


@pytest.fixture(scope="module")
def vocabularies(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of vocabularies: SentencePiece, with and without bytes; GPT-2's two; BERT's."""
    folder = tmp_path_factory.mktemp("vocabularies")
    shutil.copy(small / "small.model", folder / "bpe")
    for name, byte_fallback in (("unigram", False), ("unigram-bytes", True)):
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter("".join(CORPUS).splitlines()), model_writer=model,
            model_type="unigram", vocab_size=600, num_threads=1, minloglevel=2,
            character_coverage=0.98, byte_fallback=byte_fallback,
        )  # fmt: skip
        (folder / name).write_bytes(model.getvalue())
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


def folder_of(vocabularies: Path, folder: Path, files: dict[str, str], **configs: Any) -> Path:
    """Write a folder of copied files, each from its source, and of JSON files."""
    folder.mkdir()
    for name, source in files.items():
        shutil.copy(vocabularies / source, folder / name)
    for name, content in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


BPE = {"tokenizer.model": "bpe"}
WIDE = {"model_type": "llama", "vocab_size": 1024}
GPT2 = {"vocab.json": "vocab.json", "merges.txt": "merges.txt"}


def spm(name: str, tokenizer_class: str | None, model_type: str, **config: Any) -> tuple[Any, ...]:
    named = {} if tokenizer_class is None else {"tokenizer_class": tokenizer_class}
    model = {"model_type": model_type, "vocab_size": 1024}
    return {name: UNIGRAM.get(name, "bpe")}, {"tokenizer_config": named | config, "config": model}


LAYOUTS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "a file alone": (BPE, {}),
    "a file and config.json": (BPE, {"config": WIDE}),
    "a file and a class": (BPE, {"tokenizer_config": LLAMA}),
    "legacy": spm("tokenizer.model", "LlamaTokenizer", "llama", **NAMED, legacy=True),
    "not legacy": spm("tokenizer.model", "LlamaTokenizer", "llama", **NAMED, legacy=False),
    "legacy not said": spm("tokenizer.model", "LlamaTokenizer", "llama", **NAMED),
    "mistral": spm("tokenizer.model", "LlamaTokenizer", "mistral", **NAMED),
    "mistral, legacy": spm("tokenizer.model", "LlamaTokenizer", "mistral", **NAMED, legacy=True),
    "mistral, not legacy": spm(
        "tokenizer.model", "LlamaTokenizer", "mistral", **NAMED, legacy=False),
    "the general class": spm("tokenizer.model", "PreTrainedTokenizerFast", "llama", **NAMED),
    "gemma": spm("tokenizer.model", "GemmaTokenizer", "gemma"),
    "no class": spm("tokenizer.model", None, "llama", **NAMED),
    "no prefix": spm("tokenizer.model", "LlamaTokenizer", "llama", add_prefix_space=False),
    "a prefix": spm("tokenizer.model", "LlamaTokenizer", "llama", add_prefix_space=True),
    "added_tokens.json": (BPE, {
        "config": WIDE, "added_tokens": ADDED,
        "tokenizer_config": {**LLAMA, "eos_token": "<|im_end|>", "legacy": False}}),
    "special_tokens_map.json": (BPE, {
        "config": WIDE, "added_tokens": ADDED, "tokenizer_config": LLAMA,
        "special_tokens_map": {
            **NAMED, "pad_token": {**LISTED["1001"], "content": "<|im_start|>"},
            "additional_special_tokens": ["<|im_end|>", "<extra>"]}}),
    "tokens in the config": spm(
        "tokenizer.model", "LlamaTokenizer", "llama", **NAMED, pad_token="<pad>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"]),
    "tokens of a model's own": spm(
        "tokenizer.model", "LlamaTokenizer", "llama", image_token="<image>",
        extra_special_tokens={"audio_token": "<audio>"}),
    "added_tokens_decoder": spm(
        "tokenizer.model", "LlamaTokenizer", "llama", **NAMED, added_tokens_decoder=LISTED),
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
    "albert": spm("spiece.model", "AlbertTokenizer", "albert"),
    "xlnet": spm("spiece.model", "XLNetTokenizer", "xlnet"),
    "pegasus": spm("spiece.model", "PegasusTokenizer", "pegasus"),
    "big bird": spm("spiece.model", "BigBirdTokenizer", "big_bird"),
    "deberta 2": spm("spm.model", "DebertaV2Tokenizer", "deberta-v2"),
    "gpt 2": (GPT2, {"config": {"model_type": "gpt2", "vocab_size": 1197}}),
    "gpt 2, a prefix": (GPT2, {
        "config": {"model_type": "gpt2", "vocab_size": 1197},
        "tokenizer_config": {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}}),
    "roberta": (GPT2, {"config": {"model_type": "roberta", "vocab_size": 1300}}),
    "qwen 2": (GPT2, {
        "config": {"model_type": "qwen2", "vocab_size": 1300}, "added_tokens": {"<tool>": 1197},
        "tokenizer_config": {"tokenizer_class": "Qwen2Tokenizer"}}),
    "bert": ({"vocab.txt": "vocab.txt"}, {"config": {"model_type": "bert", "vocab_size": 80}}),
    "bert, cased": ({"vocab.txt": "vocab.txt"}, {
        "config": {"model_type": "bert", "vocab_size": 80},
        "tokenizer_config": {"tokenizer_class": "BertTokenizer", "do_lower_case": False}}),
}  # fmt: skip


def assert_as_the_library(ours: Tokenizer, auto: Any, number: int = 100) -> None:
    """Compare ids, special tokens and roles with AutoTokenizer's, and look at the bytes."""
    added = auto.added_tokens_decoder
    special = {i: token.content for i, token in added.items() if token.special}
    assert special.items() <= ours.table.control_names.items()
    roles = {role: str(name) for role, name in auto.special_tokens_map.items()}
    assert ours.special_token_names == {
        role: name for role, name in roles.items() if isinstance(name, str) and "extra" not in role
    }
    assert ours.vocabulary.tokenizer_vocab_size == max(auto.get_vocab().values()) + 1

    def library(text: str) -> list[int]:
        return list(auto(text, add_special_tokens=False)["input_ids"])

    own = f"{SPECIAL[0]}user\n{CORPUS[0][:40]}{SPECIAL[1]} </s>a <s>b<pad>[INST] c<extra_id_0>"
    for text in (own, "", " ", "  a  b\n\nc ", *texts(ours, number=number)):
        check(ours, library, text)
    for text in (" the words", "2024", *CORPUS[0].split()[:20]):
        [ids] = ours.segment_batch([text.encode()])
        if ids is not None:
            assert b"".join([ours.table[i] for i in ids]) == text.encode()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_folder_is_read_as_autotokenizer_reads_it(
    vocabularies: Path, tmp_path: Path, name: str
) -> None:
    files, configs = LAYOUTS[name]
    folder = folder_of(vocabularies, tmp_path / "model", files, **configs)
    assert_as_the_library(load_tokenizer(folder), AutoTokenizer.from_pretrained(str(folder)))

"""Model folders load like AutoTokenizer, including folders that are read without it."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hub_folders
import pytest
import transformers
from command_lines import run_python
from random_texts import check_encoding, texts
from transformers import AutoTokenizer

from xtok.errors import TokenizerError
from xtok.tokenizers import from_transformers, hf_folder, load_tokenizer
from xtok.tokenizers.hub import ModelFiles

TEXTS = (
    "The  words\n\n of 2024, and don't DON'T\t<think>x</think> ",
    "e\u0301 \u212b ﬁ① 中文字 नमस्ते ก็ 👨\u200d👩 \u00a0▁y <0x0A>",
    "<|im_start|>user\nq<|im_end|> <s>[INST] b[/INST]</s> <｜User｜>q<|eot_id|>",
    "", " ",
)  # fmt: skip
END = dict.fromkeys(("eos_token", "unk_token"), "<|end_of_text|>")
GEMMA = {
    "tokenizer_class": "GemmaTokenizerFast", "pad_token": "<s>", "bos_token": "<s>",
    "eos_token": "</s>", "mask_token": "<think>", "extra_special_tokens": {"image_token": "<s>"},
}  # fmt: skip
GPT2 = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|end_of_text|>", **END}
QWEN = {
    "tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "pad_token": "<|im_end|>", **END,
    "add_prefix_space": False, "errors": "replace", "split_special_tokens": False,
}  # fmt: skip
LLAMA = {
    "tokenizer_class": "LlamaTokenizerFast", "legacy": False, "sp_model_kwargs": {},
    "add_bos_token": True, "add_eos_token": False, "clean_up_tokenization_spaces": False,
}  # fmt: skip
Edit = Callable[[Path], None]


def edit(path: Path, **changes: Any) -> None:
    document = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**document, **changes}))


def tokens(**changes: Any) -> Edit:
    return lambda folder: edit(folder / "tokenizer_config.json", **changes)


def model(**changes: Any) -> Edit:
    return lambda folder: edit(folder / "config.json", **changes)


def listed(folder: Path) -> dict[str, Any]:
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    return {str(token.pop("id")): token for token in added}


def lists(**flags: Any) -> Edit:
    def change(folder: Path) -> None:
        added = listed(folder)
        added[max(added, key=int)] |= flags
        edit(folder / "tokenizer_config.json", added_tokens_decoder=added)

    return change


def adds(name: str, text: str) -> Edit:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    return change


def rebuilt(folder: Path) -> None:
    library = json.loads(AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer.to_str())
    parts = ("normalizer", "pre_tokenizer", "decoder", "model")
    edit(folder / "tokenizer.json", **{part: library[part] for part in parts})


def added(**flags: Any) -> Edit:
    """Change the last added token of tokenizer.json."""

    def change(folder: Path) -> None:
        tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
        tokens[-1] |= flags
        edit(folder / "tokenizer.json", added_tokens=tokens)

    return change


def overlaps(folder: Path) -> None:
    document = json.loads((folder / "tokenizer.json").read_text())
    names = {i: name for name, i in document["model"]["vocab"].items()}
    token = {**document["added_tokens"][-1], "id": 300, "content": names[300]}
    edit(folder / "tokenizer.json", added_tokens=[token, *document["added_tokens"]])


def is_short(folder: Path) -> bool:
    """Return whether the folder is read without Transformers."""
    return hf_folder.without_library(ModelFiles(folder)) is not None


def assert_as_transformers(folder: Path, num_texts: int = 0) -> None:
    ours = load_tokenizer(folder)
    auto: Any = AutoTokenizer.from_pretrained(str(folder))
    theirs = from_transformers(auto, vocab_size=len(ours.table))
    assert ours.table.sha256() == theirs.table.sha256()
    assert ours.table.types.tolist() == theirs.table.types.tolist()
    assert ours.table.roles == theirs.table.roles
    for role in ("bos", "eos", "pad", "sep", "cls", "mask"):
        own = (i for i, who in ours.declared[role].items() if who == "the tokenizer")
        assert next(own, None) == getattr(auto, f"{role}_token_id")
    assert ours.definition_sha256 == theirs.definition_sha256
    assert ours.table.preferred_ids == theirs.table.preferred_ids
    assert ours.text_changes == theirs.text_changes
    assert ours.chat_templates == theirs.chat_templates
    assert ours.special_token_names == theirs.special_token_names
    begins = auto("the")["input_ids"][0]
    assert ours.bos_id == theirs.bos_id == (begins if begins == auto.bos_token_id else None)
    assert ours.library_ids(TEXTS) == theirs.library_ids(TEXTS)
    prompts, expected = (each.encode_batch(TEXTS) for each in (ours, theirs))
    assert prompts == expected
    pieces = [token for token in theirs.table.tokens() if token]
    pieces = pieces[:: 1 + len(pieces) // 2000]
    assert ours.segment_batch(pieces) == theirs.segment_batch(pieces)
    for text in texts(ours, num_texts=num_texts):
        check_encoding(
            ours, lambda text: list(auto(text, add_special_tokens=False)["input_ids"]), text
        )


def copied(source: Path, folder: Path, *edits: Edit) -> Path:
    shutil.copytree(source, folder)
    for change in edits:
        change(folder)
    return folder


DIGITS: dict[bool, dict[str, list[Edit]]] = {
    True: {
        "lists": [lists(), tokens(model_max_length=10**30)],
        "no config.json": [lambda folder: (folder / "config.json").unlink()],
        "saved by Transformers 5": [tokens(
            tokenizer_class="TokenizersBackend", backend="tokenizers", is_local=True,
            extra_special_tokens=["<|im_end|>"])],
        "a chat template": [tokens(chat_template="{{ messages }}")],
        "more chat templates": [adds("additional_chat_templates/rag.jinja", "{{ messages }}")],
        "chat templates": [tokens(chat_template=[
            {"name": "default", "template": "{{ a }}"}, {"name": "rag", "template": "{{ b }}"}])],
        "chat_template.jinja": [
            tokens(chat_template="{{ old }}"), adds("chat_template.jinja", "{{ new }}\n")],
        "listed twice": [lists(), adds("special_tokens_map.json", "{}")],
        "a text token made special": [tokens(pad_token="<think>")],
        "named extra tokens": [tokens(extra_special_tokens={"image_token": "<|im_end|>"})],
    },
    False: {
        "a model type that is not known": [model(model_type="gpt_neox")],
        "a config.json without a model type": [adds("config.json", '{"vocab_size": 896}')],
        "no class": [lambda folder: (folder / "tokenizer_config.json").unlink()],
        "another class": [tokens(tokenizer_class="LlamaTokenizerFast")],
        "an unknown key": [tokens(fix_mistral_regex=True)],
        "special tokens split": [tokens(split_special_tokens=True)],
        "a token that tokenizer.json lacks": [tokens(pad_token="<|new|>")],
        "an extra token made special": [tokens(additional_special_tokens=["<think>"])],
        "a named extra token made special": [tokens(image_token="<think>")],
        "another flag": [lists(special=True)],
        "old lists": [adds("special_tokens_map.json", '{"unk_token": "<|pad|>"}')],
        "old added tokens": [adds("added_tokens.json", '{"<|new|>": 800}')],
        "padding": [lambda folder: edit(folder / "tokenizer.json", padding={
            "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None,
            "pad_id": 795, "pad_type_id": 0, "pad_token": "<|im_end|>"})],
    },
}  # fmt: skip
QWENS = [tokens(**QWEN), model(model_type="qwen3"), rebuilt]
GEMMAS = [tokens(**GEMMA, boi_token="</s>"), model(model_type="gemma3_text"), rebuilt, lists()]
LLAMAS = [tokens(**LLAMA), model(model_type="llama"), rebuilt]
GPT2S = [tokens(**GPT2), model(model_type="gpt2"), rebuilt]
OTHERS: dict[bool, dict[str, tuple[str, list[Edit]]]] = {
    True: {
        "deepseek": ("byte-level", [
            tokens(**LLAMA, unk_token=None, pad_token={
                "__type": "AddedToken", "content": "<|end_of_text|>", "lstrip": False,
                "normalized": True, "rstrip": False, "single_word": False}),
            model(model_type="deepseek_v3", auto_map={"AutoConfig": "configuration.Config"})]),
        "mistral": ("hf", [
            tokens(**LLAMA, add_prefix_space=True), lists(), model(model_type="mistral")]),
        "qwen": ("byte-level", QWENS),
        "qwen, an added token in the vocabulary": ("byte-level", [*QWENS, overlaps]),
        "gemma": ("hf", GEMMAS),
        "gemma, no class": ("hf", [*GEMMAS, tokens(tokenizer_class=None)]),
        "llama": ("hf", LLAMAS),
        "llama, lists": ("hf", [*LLAMAS, lists(), tokens(add_prefix_space=None)]),
        "llama, a normalized token": ("hf", [*LLAMAS, added(normalized=True)]),
        "gpt 2": ("byte-level", [*GPT2S, lists()]),
    },
    False: {
        "qwen, not rebuilt": ("byte-level", QWENS[:-1]),
        "qwen, no NFC": (
            "byte-level", [*QWENS, lambda path: edit(path / "tokenizer.json", normalizer=None)]),
        "qwen, a prefix space": ("byte-level", [*QWENS, tokens(add_prefix_space=True)]),
        "qwen, a special token by default": ("byte-level", [
            *QWENS, adds("tokenizer_config.json",
                         json.dumps({key: QWEN[key] for key in QWEN if key != "pad_token"}))]),
        "qwen, another class": ("byte-level", [*QWENS, tokens(tokenizer_class="GPT2Tokenizer")]),
        "qwen, as it is": (  # versions of Transformers differ
            "byte-level", [*QWENS, tokens(tokenizer_class="PreTrainedTokenizerFast")]),
        "gemma, not rebuilt": ("hf", GEMMAS[:2]),
        "gemma, a new token": ("hf", [*GEMMAS, tokens(mask_token="<mask>")]),
        "gemma, another unknown token": ("hf", [*GEMMAS, tokens(unk_token="<s>")]),
        "llama, not rebuilt": ("hf", LLAMAS[:-1]),
        "llama, legacy": ("hf", [*LLAMAS, tokens(legacy=True)]),
        "llama, no prefix": ("hf", [*LLAMAS, tokens(add_prefix_space=False)]),
        "gpt 2, not rebuilt": ("byte-level", GPT2S[:-1]),
        "gpt 2, a class elsewhere": (
            "byte-level",
            [*GPT2S, tokens(tokenizer_class=None), model(tokenizer_class="GPT2Tokenizer")]),
    },
}  # fmt: skip
FOLDERS = [
    *((short, name, "digits", edits) for short in DIGITS for name, edits in DIGITS[short].items()),
    *((short, name, *folder) for short in OTHERS for name, folder in OTHERS[short].items()),
]


@pytest.mark.parametrize(("short", "name", "source", "edits"), FOLDERS)
def test_folders_with_and_without_transformers(
    small: Path, tmp_path: Path, short: bool, name: str, source: str, edits: list[Edit]
) -> None:
    folder = copied(small / f"small-{source}", tmp_path / name, *edits)
    assert is_short(folder) == (short and hf_folder.can_read_alone())
    assert_as_transformers(folder)


@pytest.mark.parametrize(
    "wrong",
    [
        tokens(tokenizer_class=["PreTrainedTokenizerFast"]),
        tokens(tokenizer_class={}),
        tokens(tokenizer_class=5),
        tokens(additional_special_tokens=True),
        tokens(extra_special_tokens=True),
        tokens(unk_token=""),
        model(model_type=[]),
    ],
)
def test_configs_with_wrong_types(small: Path, tmp_path: Path, wrong: Edit) -> None:
    folder = copied(small / "small-digits", tmp_path / "folder", wrong)
    with pytest.raises(TokenizerError, match="AutoTokenizer"):
        load_tokenizer(folder)


LOAD = """
import sys
sys.path.insert(0, sys.argv[1])
from xtok.tokenizers import load_tokenizer
for path in sys.argv[2:]:
    tokenizer = load_tokenizer(path)
    print(tokenizer.encode('two boats').ids.tolist(), len(tokenizer.notes))
print('tokenizers' in sys.modules, 'transformers' in sys.modules)
"""


checked = pytest.mark.skipif(
    not hf_folder.can_read_alone(), reason="Transformers reads all folders"
)


@checked
@pytest.mark.parametrize("name", hf_folder.BUILT)
def test_fingerprints_match_the_installed_transformers(name: str) -> None:
    built, library_class = hf_folder.BUILT[name], getattr(transformers, name)

    def fingerprint(**options: bool) -> str:
        return hf_folder.fingerprint(library_class(**options).backend_tokenizer)

    assert fingerprint() == fingerprint(legacy=False) == built.fingerprint
    prefix = name == "LlamaTokenizer"
    assert fingerprint(add_prefix_space=prefix) == built.fingerprint
    assert fingerprint(add_prefix_space=not prefix) != built.fingerprint or name == "GemmaTokenizer"
    arguments = inspect.signature(library_class.__init__).parameters.items()
    named = {k: v.default for k, v in arguments if k.endswith("_token") and v.default is not None}
    assert named == built.roles


@checked
def test_classes_match_the_installed_transformers(small: Path, tmp_path: Path) -> None:
    loaded_as = {
        (t, name): "TokenizersBackend" for t, ns in hf_folder.READ_DIRECTLY.items() for name in ns
    }
    loaded_as |= {(t, name): name for t, name in hf_folder.BUILDERS.items()}
    classes = {}
    for i, (model_type, name) in enumerate(loaded_as):
        source = small / ("small-hf" if model_type == "llama" else "small-byte-level")
        folder = copied(source, tmp_path / str(i), tokens(tokenizer_class=name))
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        if not model_type:
            (folder / "config.json").unlink()
        classes[model_type, name] = type(AutoTokenizer.from_pretrained(str(folder))).__name__
    assert classes == loaded_as


def test_versions_of_transformers(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, reads_alone in {
        "4.57.6": 0,
        "5.7.0": 0,
        "5.8.0": 1,
        "5.99.0.dev0": 1,
        "6.0": 1,
    }.items():
        metadata = tmp_path / number / f"transformers-{number}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Name: transformers\nVersion: {number}\n")
        monkeypatch.syspath_prepend(tmp_path / number)
        assert is_short(small / "small-digits") == bool(reads_alone), number


def test_mistral_with_its_own_library(small: Path, tmp_path: Path) -> None:
    """A stub replaces mistral-common, which AutoTokenizer would use for tekken.json."""
    (tmp_path / "mistral_common").mkdir()
    (tmp_path / "mistral_common" / "__init__.py").write_text("")
    metadata = tmp_path / "mistral_common-1.13.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: mistral-common\nVersion: 1.13.1\n")
    folder = copied(small / "small-hf", tmp_path / "folder", model(model_type="mistral"))
    shutil.copy(folder / "config.json", folder / "tekken.json")
    by_library = copied(folder, tmp_path / "unknown", tokens(some_key=1))
    result = run_python(LOAD, tmp_path, folder, folder / "tokenizer.json", by_library)
    expected = load_tokenizer(folder).encode("two boats").ids.tolist()
    assert result.stdout.startswith(f"{expected} 1\n" * 3), result.stderr


@checked
def test_transformers_is_not_imported(small: Path, tmp_path: Path) -> None:
    shutil.copy(small / "small-digits" / "tokenizer.json", tmp_path / "mine.json")
    qwen = copied(small / "small-byte-level", tmp_path / "qwen", *QWENS)
    paths = [small / "small-digits", small / "small-hf", qwen, tmp_path / "mine.json"]
    result = run_python(LOAD, "", *paths)
    assert result.stdout.endswith("\nTrue False\n"), result.stderr


def unigram(folder: Path, tokenizer_class: str, model_type: str) -> Path:
    """Write a Unigram folder as T5's: Metaspace, and an unknown token instead of bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    pieces = ["<pad>", "</s>", "<unk>", "▁", "▁the", "▁words", "s", "o", "f", "▁of", "2", "0", "4"]
    vocab = [(piece, 0.0 if i < 3 else -float(i)) for i, piece in enumerate(pieces)]
    rust = Tokenizer(models.Unigram(vocab, unk_id=2, byte_fallback=False))
    rust.normalizer = normalizers.Sequence([normalizers.NFKC()])
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    rust.decoder = decoders.Metaspace()
    rust.add_special_tokens(pieces[:3])
    folder.mkdir()
    rust.save(str(folder / "tokenizer.json"))
    special = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    edit(folder / "tokenizer_config.json", tokenizer_class=tokenizer_class, **special)
    edit(folder / "config.json", model_type=model_type, vocab_size=128)
    return folder


def test_unigram_folders_load_as_in_transformers(tmp_path: Path) -> None:
    plain = unigram(tmp_path / "plain", "PreTrainedTokenizerFast", "llama")
    assert is_short(plain) == hf_folder.can_read_alone()
    t5 = unigram(tmp_path / "t5", "T5TokenizerFast", "t5")
    assert not is_short(t5)
    for folder in (plain, t5):
        assert_as_transformers(folder)
        assert load_tokenizer(folder).table[4] == b" the"


@pytest.mark.real
@pytest.mark.parametrize("name", [*hub_folders.NAMES, "claude-2"])
def test_folders_as_on_the_hub(
    real: Callable[[str], str], hub_folder: Callable[[str], Path], name: str
) -> None:
    if name == "claude-2":
        folder = Path(real(name))
    else:
        folder = hub_folder(name)
        # Llama 2's file has another normalizer than its class builds.
        assert is_short(folder) == (name != "llama2" and hf_folder.can_read_alone())
    assert_as_transformers(folder, num_texts=150)


@pytest.mark.real
def test_the_pattern_of_a_mistral_folder_is_reported(
    hub_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(hub_folder("llama3"), tmp_path / "mistral"))
    edit(folder / "config.json", model_type="mistral")
    wrong = load_tokenizer(folder)
    assert len(wrong.notes) == 1
    assert "fix_mistral_regex" in wrong.notes[0]
    edit(folder / "tokenizer_config.json", fix_mistral_regex=True)
    right = load_tokenizer(folder)
    assert not right.notes
    assert len(wrong.segment(b"201")) < len(right.segment(b"201")) == 3

"""Write Llama 3, Qwen3, DeepSeek-V3 and Mistral v0.3 as folders, with configs as on the hub.

`tokenizer.json` is made from the fetched tokenizers, by Transformers' converters. Tests and the
benchmark `folders` use them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import fetch_tokenizers
import small_tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers

from xtok.tokenizers import load_tokenizer
from xtok.tokenizers._tiktoken import LLAMA_3_PATTERN, QWEN_PATTERN
from xtok.vocab.table import TokenType

NAMES = ("llama3", "qwen", "deepseek-v3", "mistral-v3")
Config = dict[str, Any]


def write(name: str, folder: Path, source: Path = fetch_tokenizers.DEFAULT_DIR) -> Path:
    """Write one of `NAMES` into a folder, and return the folder.

    Raises:
        FileNotFoundError: if the tokenizer was not fetched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    {"llama3": _llama, "qwen": _qwen, "deepseek-v3": _deepseek, "mistral-v3": _mistral}[name](
        folder, source
    )
    return folder


def _llama(folder: Path, source: Path) -> None:
    """Write what meta-llama/Llama-3.1-8B-Instruct has."""
    rust = _from_ranks(source / "llama3.tiktoken", LLAMA_3_PATTERN)
    rust.model.ignore_merges = True
    special = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    config: Config = {
        "added_tokens_decoder": _listed(rust), **special,
        "chat_template": _template(source, "llama3_1"), "clean_up_tokenization_spaces": True,
        "model_input_names": ["input_ids", "attention_mask"], "model_max_length": 131072,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }  # fmt: skip
    _write(folder, rust, config, {"model_type": "llama", "vocab_size": 128256})
    _write_json(folder / "special_tokens_map.json", special)


def _qwen(folder: Path, source: Path) -> None:
    """Write what Qwen/Qwen3-8B has."""
    rust = _from_ranks(source / "qwen.tiktoken", QWEN_PATTERN)
    rust.normalizer = normalizers.NFC()
    listed = _listed(rust)
    config: Config = {
        "add_bos_token": False, "add_prefix_space": False, "added_tokens_decoder": listed,
        "additional_special_tokens": [t["content"] for t in listed.values() if t["special"]][1:],
        "bos_token": None, "chat_template": _template(source, "qwen3"),
        "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>", "errors": "replace",
        "model_max_length": 131072, "pad_token": "<|endoftext|>", "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer", "unk_token": None,
    }  # fmt: skip
    _write(folder, rust, config, {"model_type": "qwen3", "vocab_size": 151936})


def _deepseek(folder: Path, source: Path) -> None:
    """Write what deepseek-ai/DeepSeek-V3 has."""
    rust = Tokenizer.from_file(str(source / "deepseek-v3" / "tokenizer.json"))
    flags = {"__type": "AddedToken", "lstrip": False, "normalized": True, "rstrip": False}
    end = {**flags, "content": "<｜end▁of▁sentence｜>", "single_word": False}
    config: Config = {
        "add_bos_token": True, "add_eos_token": False,
        "bos_token": {**end, "content": "<｜begin▁of▁sentence｜>"},
        "clean_up_tokenization_spaces": False, "eos_token": end, "legacy": True,
        "model_max_length": 131072, "pad_token": end, "sp_model_kwargs": {}, "unk_token": None,
        "tokenizer_class": "LlamaTokenizerFast",
        "chat_template": _template(source, "deepseekv3_training"),
    }  # fmt: skip
    auto_map = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    width = {"model_type": "deepseek_v3", "vocab_size": 129280, "auto_map": auto_map}
    _write(folder, rust, config, width)


def _mistral(folder: Path, source: Path) -> None:
    """Write what mistralai/Mistral-7B-Instruct-v0.3 has."""
    shutil.copy(source / "mistral-v3.model", folder / "tokenizer.model")
    small_tokenizers.sentencepiece_hf(folder, folder / "tokenizer.model")
    rust = Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config: Config = {
        "add_bos_token": True, "add_eos_token": False, "add_prefix_space": True,
        "added_tokens_decoder": _listed(rust), "additional_special_tokens": [], **special,
        "clean_up_tokenization_spaces": False, "legacy": False, "model_max_length": 10**30,
        "pad_token": None, "sp_model_kwargs": {}, "spaces_between_special_tokens": False,
        "tokenizer_class": "LlamaTokenizer", "use_default_system_prompt": False,
    }  # fmt: skip
    _write(folder, rust, config, {"model_type": "mistral", "vocab_size": 32768})
    _write_json(folder / "special_tokens_map.json", special)


def _from_ranks(path: Path, pattern: str) -> Tokenizer:
    """Convert a rank file, with the added tokens that xtok knows of its family."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    # By position: the name of the last one, special tokens, depends on the version.
    rust: Tokenizer = TikTokenConverter(str(path), pattern, False, []).converted()  # type: ignore[no-untyped-call]
    rust.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    rust.decoder = decoders.ByteLevel()
    rust.model.ignore_merges = False
    table = load_tokenizer(path).table
    for i in range(rust.get_vocab_size(), len(table)):
        special = table.types[i] == TokenType.CONTROL
        content = table.control_names[i] if special else table[i].decode()
        token = AddedToken(content, normalized=False, special=bool(special))
        (rust.add_special_tokens if special else rust.add_tokens)([token])
    return rust


def _listed(rust: Tokenizer) -> Config:
    """Return the `added_tokens_decoder` of a `tokenizer_config.json`."""
    flags = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    added = sorted(rust.get_added_tokens_decoder().items())
    return {str(i): {flag: getattr(token, flag) for flag in flags} for i, token in added}


def _template(source: Path, name: str) -> str:
    return (source / "chat-templates" / f"{name}.jinja").read_text(encoding="utf-8")


def _write(folder: Path, rust: Tokenizer, tokenizer_config: Config, config: Config) -> None:
    rust.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_json(folder / "config.json", config)


def _write_json(path: Path, value: Config) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8", newline="\n")

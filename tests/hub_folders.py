"""Write folders with configs as on the hub: Llama 3, Qwen3, DeepSeek-V3, Mistral, Gemma, Llama 2.

Transformers converts the fetched tokenizers to `tokenizer.json`. Gemma and Llama 2 have Mistral's
vocabulary. Tests and the benchmark `commands` use these folders.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import fetch_tokenizers
import small_tokenizers
from make_tokenizers import converted_ranks
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers

from xtok.tokenizers import load_tokenizer
from xtok.tokenizers.table import TokenType

NAMES = ("llama3", "qwen", "deepseek-v3", "mistral-v3", "gemma3", "llama2")
Config = dict[str, Any]
DIGIT, THREE_DIGITS = small_tokenizers.split_pattern(1), small_tokenizers.split_pattern(3)
CASES = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    "qwen": DIGIT, **dict.fromkeys(["llama3", "cl100k"], THREE_DIGITS),
    **dict.fromkeys(["llama4", "o200k"], CASES),
}  # fmt: skip
"""The split patterns of rank files, from the code of each model."""


def write(name: str, folder: Path, source: Path = fetch_tokenizers.DEFAULT_DIR) -> Path:
    """Write one of `NAMES` into a folder, and return the folder.

    Raises:
        FileNotFoundError: if the tokenizer was not fetched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    writers = (_llama, _qwen, _deepseek, _mistral, _gemma, _llama_2)
    dict(zip(NAMES, writers, strict=True))[name](folder, source)
    return folder


def _llama(folder: Path, source: Path) -> None:
    """Write the files of meta-llama/Llama-3.1-8B-Instruct."""
    rust = _from_ranks(source / "llama3.tiktoken", THREE_DIGITS)
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
    """Write the files of Qwen/Qwen3-8B."""
    rust = _from_ranks(source / "qwen.tiktoken", DIGIT)
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
    """Write the files of deepseek-ai/DeepSeek-V3."""
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
    """Write the files of mistralai/Mistral-7B-Instruct-v0.3."""
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


def _gemma(folder: Path, source: Path) -> None:
    """Write the files of google/gemma-3-4b-it, with a small vocabulary."""
    shutil.copy(source / "mistral-v3.model", folder / "tokenizer.model")
    small_tokenizers.sentencepiece_hf(folder, folder / "tokenizer.model")
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    names = (
        *("<bos>", "<eos>", "<pad>", "<mask>", "<start_of_turn>", "<end_of_turn>"),
        *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    )
    mistrals = (
        *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
        *("[/TOOL_RESULTS]", "[IMG]", "[PREFIX]"),
    )
    for mistral, gemma in zip(mistrals, names, strict=True):
        text = text.replace(json.dumps(mistral), json.dumps(gemma))
    document = json.loads(text)
    spaces = {"pattern": {"String": " "}}
    document["normalizer"] = {"type": "Replace", **spaces, "content": "▁"}
    document["pre_tokenizer"] = {
        "type": "Split", **spaces, "behavior": "MergedWithPrevious", "invert": False
    }  # fmt: skip
    document["model"]["unk_token"] = "<unk>"
    document["decoder"]["decoders"].pop()  # Strip is the inverse of Mistral's prefix
    for token in document["added_tokens"]:
        token["special"] = token["content"] != "<mask>"
    rust = Tokenizer.from_str(json.dumps(document))
    image = {"boi_token": names[6], "eoi_token": names[7], "image_token": names[8]}
    config: Config = {
        "add_bos_token": True, "add_eos_token": False, "added_tokens_decoder": _listed(rust),
        "bos_token": "<bos>", "chat_template": _template(source, "gemma3"),
        "clean_up_tokenization_spaces": False, "eos_token": "<eos>", "extra_special_tokens": image,
        "model_max_length": 10**30, "pad_token": "<pad>", "processor_class": "Gemma3Processor",
        "sp_model_kwargs": None, "spaces_between_special_tokens": False, "unk_token": "<unk>",
        "tokenizer_class": "GemmaTokenizer", "use_default_system_prompt": False, **image,
    }  # fmt: skip
    (folder / "tokenizer.model").unlink()
    _write(folder, rust, config, {"model_type": "gemma3", "vocab_size": 32768})


def _llama_2(folder: Path, source: Path) -> None:
    """Write the files of meta-llama/Llama-2-7b-chat-hf, with a small vocabulary."""
    shutil.copy(source / "mistral-v1.model", folder / "tokenizer.model")
    small_tokenizers.sentencepiece_hf(folder, folder / "tokenizer.model")
    rust = Tokenizer.from_file(str(folder / "tokenizer.json"))
    spaces = normalizers.Replace(" ", "▁")
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    flags = {"__type": "AddedToken", "lstrip": False, "normalized": False, "rstrip": False}
    config: Config = {
        "add_bos_token": True, "add_eos_token": False, "clean_up_tokenization_spaces": False,
        **{k: {**flags, "content": v, "single_word": False} for k, v in special.items()},
        "legacy": False, "model_max_length": 10**30, "pad_token": None, "padding_side": "right",
        "sp_model_kwargs": {}, "tokenizer_class": "LlamaTokenizer",
    }  # fmt: skip
    _write(folder, rust, config, {"model_type": "llama", "vocab_size": 32000})
    _write_json(folder / "special_tokens_map.json", special)


def _from_ranks(path: Path, pattern: str) -> Tokenizer:
    """Convert a rank file, with the added tokens of its family in xtok."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    rust = converted_ranks(path, pattern)
    rust.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    rust.decoder = decoders.ByteLevel()
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

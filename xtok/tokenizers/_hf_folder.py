"""Hugging Face folders and repos with a `tokenizer.json`: what AutoTokenizer loads from them.

Importing Transformers takes seconds, so the `tokenizers` library reads `tokenizer.json` alone where
AutoTokenizer would not change what it says. That is known if all of this holds; if not,
Transformers decides:

- The installed Transformers is of a version that this rule was checked with.
- For the `model_type` in `config.json` and the class in `tokenizer_config.json`, AutoTokenizer
  takes `tokenizer.json` as it is; or it builds a Qwen2Tokenizer, and `tokenizer.json` has just the
  parts that this class builds.
- `tokenizer_config.json` has only keys that change neither tokens nor how text is encoded.
- The added and special tokens that it lists are those of `tokenizer.json`, flags included.
- No other file lists tokens or chat templates, and `tokenizer.json` neither pads nor truncates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xtok.errors import TokenizerError
from xtok.tokenizers._folder import SPECIAL_NAMES, chat_templates
from xtok.tokenizers._hf import HuggingFaceBackend, components
from xtok.tokenizers._tekken import TEKKEN_PATTERN
from xtok.tokenizers._tiktoken import QWEN_PATTERN
from xtok.tokenizers._tokenizer import refuse_pattern
from xtok.tokenizers.hub import ModelFiles, hub_answers, quiet_hub

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as RustTokenizer


def load_folder(
    files: ModelFiles, *, pattern: str | None = None, trust_remote_code: bool = False
) -> HuggingFaceBackend:
    """Load what `AutoTokenizer` loads from a folder or repo.

    Raises:
        TokenizerError: if that fails, gives a slow tokenizer, or needs code that is not trusted.
    """
    refuse_pattern(pattern, f"{files} is a Hugging Face tokenizer")
    plain = None if trust_remote_code else _read_alone(files)
    backend = HuggingFaceBackend(
        plain or _by_transformers(files, trust_remote_code), files, copy=plain is None
    )
    notes = []
    if trust_remote_code and runs_code(files):
        revision = files.commit or files.revision
        at = f" at {revision}" if revision else ""
        notes.append(f"ran the tokenizer code of {files}{at}, as you allowed")
    if backend.byte_level_splits() not in (None, TEKKEN_PATTERN) and _is_old_mistral(files):
        notes.append(
            f"{files} splits text as its tokenizer.json says, which Transformers calls wrong; for "
            'the other pattern, write "fix_mistral_regex": true into its tokenizer_config.json'
        )
    backend.notes = tuple(notes)
    return backend


def _by_transformers(files: ModelFiles, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    local = files.offline or (isinstance(files.model, str) and not hub_answers())
    try:
        with quiet_hub():
            tokenizer = AutoTokenizer.from_pretrained(
                files.model,
                revision=files.commit or files.revision,
                local_files_only=local,
                use_fast=True,
                trust_remote_code=trust_remote_code,
            )
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise TokenizerError(
                f"{files} needs code of its own",
                hint="read that code, then allow it with {option}; or give its tokenizer.json, if "
                "it has one",
                parameter="trust_remote_code",
            ) from error
        raise TokenizerError(
            f"{files} is not a tokenizer that AutoTokenizer loads: {error}",
            hint="check its tokenizer.json and tokenizer_config.json, or fetch them again",
        ) from error
    if not tokenizer.is_fast:
        raise TokenizerError(
            f"{files} loads as {type(tokenizer).__name__}, a slow tokenizer",
            hint="save a fast one with AutoTokenizer.from_pretrained(...).save_pretrained(...)",
        )
    return tokenizer


def _is_old_mistral(files: ModelFiles) -> bool:
    """Tell whether Transformers would offer `fix_mistral_regex` (`_patch_mistral_regex`)."""
    config = files.json("config.json")
    saved_by = str(config.get("transformers_version") or "0").partition(".")[0]
    types = ("mistral", "mistral3", "voxtral", "ministral", "pixtral")
    return config.get("model_type") in types and saved_by in "01234"


def runs_code(files: ModelFiles) -> bool:
    """Tell whether a folder's tokenizer is a class of its own."""
    return "auto_map" in files.json("tokenizer_config.json")


def load_json(
    path: Path, files: ModelFiles | None = None, *, pattern: str | None = None
) -> HuggingFaceBackend:
    """Load a `tokenizer.json` alone, with the configs of a folder for its width and roles.

    Raises:
        TokenizerError: if it is not one.
    """
    refuse_pattern(pattern, f"{path} is a Hugging Face tokenizer")
    files = files or ModelFiles(path)
    if (plain := _read_file(path)) is not None:
        return HuggingFaceBackend(plain, files, copy=False)
    from transformers import PreTrainedTokenizerFast

    load: Callable[..., Any] = PreTrainedTokenizerFast
    try:
        tokenizer = load(tokenizer_file=str(path))
    except Exception as error:
        raise TokenizerError(
            f"{path} is JSON, but neither a tokenizer.json nor a tekken file: {error}",
            hint="give a tokenizer's file, or the folder of a Hugging Face tokenizer",
        ) from error
    return HuggingFaceBackend(tokenizer, files)


class PlainTokenizer:
    """What `HuggingFaceBackend` uses of a `PreTrainedTokenizerFast`, without Transformers.

    Raises:
        Exception: as the `tokenizers` library does, if the file is not a `tokenizer.json`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.backend_tokenizer = self._read()
        self.added_tokens_decoder: dict[int, AddedToken] = (
            self.backend_tokenizer.get_added_tokens_decoder()
        )
        self.chat_template: Mapping[str, str] = {}

    def _read(self) -> RustTokenizer:
        from tokenizers import Tokenizer as RustTokenizer

        return RustTokenizer.from_file(str(self._path))

    @functools.cached_property
    def _prompts(self) -> RustTokenizer:
        """The tokenizer for whole prompts, which few commands encode; the backend has the other."""
        return self._read()

    def __call__(self, texts: list[str], **_: bool) -> dict[str, list[Any]]:
        """Encode whole texts as they are, without further special tokens."""
        encodings = self._prompts.encode_batch(texts, add_special_tokens=False)
        return {
            "input_ids": [encoding.ids for encoding in encodings],
            "offset_mapping": [encoding.offsets for encoding in encodings],
        }


# By a model's type, "" without a config.json: the classes for which AutoTokenizer takes
# tokenizer.json as it is, or builds the same (_is_qwen). From models/auto/tokenization_auto.py of
# transformers 5.8.1, 5.12.1, 5.16.1, 5.20.2 and 5.23.0. Some versions before lose DeepSeek's spaces
# (https://github.com/huggingface/transformers/issues/45488).
_PLAIN = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
_LLAMA = _PLAIN | {"LlamaTokenizer", "LlamaTokenizerFast"}
_DEEPSEEK_TYPES = ("deepseek_v2", "deepseek_v3")
_MISTRAL_TYPES = ("mistral", "mixtral", "mistral3", "ministral3")
_QWEN_TYPES = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
_CLASSES = {
    **dict.fromkeys(("", "llama", "llama4", "gpt_oss", "glm4_moe", "nemotron_h"), _PLAIN),
    **dict.fromkeys((*_DEEPSEEK_TYPES, *_MISTRAL_TYPES), _LLAMA),
    **dict.fromkeys(_QWEN_TYPES, _PLAIN | {"Qwen2Tokenizer", "Qwen2TokenizerFast"}),
}

_NAMES = frozenset(f"{role}_token" for role in SPECIAL_NAMES)
_EXTRA = ("additional_special_tokens", "extra_special_tokens")
_HARMLESS = {  # about decoding, lengths, the ends of a text; or for slow tokenizers alone
    *("add_bos_token", "add_eos_token", "backend", "chat_template", "clean_up_tokenization_spaces"),
    *("errors", "is_local", "legacy", "local_files_only", "model_input_names", "model_max_length"),
    *("padding_side", "sp_model_kwargs", "spaces_between_special_tokens", "truncation_side"),
    *("use_default_system_prompt",),
}
_CHECKED = {"added_tokens_decoder", "add_prefix_space", "split_special_tokens", "tokenizer_class"}
_KEYS = {*_NAMES, *_EXTRA, *_HARMLESS, *_CHECKED}
_FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def is_checked() -> bool:
    """Tell whether the installed Transformers is of a version that the rule was checked with."""
    return (5, 8) <= tuple(map(int, version("transformers").split(".")[:2])) < (6, 0)


def _read_alone(files: ModelFiles) -> PlainTokenizer | None:
    """Read a folder by its `tokenizer.json`; None where Transformers must decide."""
    try:
        path, config = files.find("tokenizer.json"), files.json("tokenizer_config.json")
        model = files.json("config.json") if files.find("config.json") else {"model_type": ""}
        model_type = str(model.get("model_type"))
        if path is None or not _configs_allow(files, config, model_type):
            return None
        templates = chat_templates(files)
        if not all(templates.values()):
            return None
    except files.error:  # what is missing or damaged: Transformers has its own answer
        return None
    plain = _read_file(path)
    if plain is None or not _tokens_allow(plain, config, model_type):
        return None
    plain.chat_template, rust = templates, plain.backend_tokenizer
    for name in (name for name in _NAMES if config.get(name) is not None):
        setattr(plain, f"{name}_id", rust.token_to_id(_content(config[name])))
    return plain


def _read_file(path: Path) -> PlainTokenizer | None:
    """Read a `tokenizer.json`; None where Transformers must decide, or say what is wrong."""
    if not is_checked():
        return None
    try:
        plain = PlainTokenizer(path)
    except Exception as error:
        if type(error) is not Exception:
            raise
        return None  # the library's own error
    rust = plain.backend_tokenizer
    return plain if rust.padding is None and rust.truncation is None else None


def _configs_allow(files: ModelFiles, config: Mapping[str, Any], model_type: str) -> bool:
    """Tell whether the configs, and which files there are, leave it to `tokenizer.json`."""
    old_files = ("special_tokens_map.json", "added_tokens.json")  # read without the listing
    return (
        str(config.get("tokenizer_class")) in _CLASSES.get(model_type, ())
        and config.keys() <= _KEYS
        and not config.get("split_special_tokens")
        and not (model_type in _MISTRAL_TYPES and find_spec("mistral_common"))
        and ("added_tokens_decoder" in config or not any(map(files.find, old_files)))
        and not files.has_folder("additional_chat_templates")
    )


def _tokens_allow(plain: PlainTokenizer, config: Mapping[str, Any], model_type: str) -> bool:
    """Tell whether the config lists the tokens of `tokenizer.json`, and the class has its parts."""
    added = plain.added_tokens_decoder
    listed = {str(i): {flag: getattr(t, flag) for flag in _FLAGS} for i, t in added.items()}
    special = {token.content for token in added.values() if token.special}
    named = [config[name] for name in _NAMES if config.get(name) is not None]
    for key in _EXTRA:
        named += extra if isinstance(extra := config.get(key) or [], list) else [extra]
    byte_level = type(plain.backend_tokenizer.decoder).__name__ == "ByteLevel"
    return (
        config.get("added_tokens_decoder", listed) == listed
        and special.issuperset(map(_content, named))
        and (model_type not in _DEEPSEEK_TYPES or byte_level)
        and (model_type not in _QWEN_TYPES or (byte_level and _is_qwen(plain, config)))
    )


def _content(token: Any) -> str:
    """Return a special token's text, which may be given with its flags."""
    return str(token.get("content") if isinstance(token, dict) else token)


def _is_qwen(plain: PlainTokenizer, config: Mapping[str, Any]) -> bool:
    """Tell whether `tokenizer.json` has just the parts that a Qwen2Tokenizer builds.

    It takes vocabulary and merges from the file, numbers added tokens from the vocabulary's end,
    and has defaults for special tokens (models/qwen2/tokenization_qwen2.py, transformers 5.23.0).
    """
    rust = plain.backend_tokenizer
    model, size = rust.model, rust.get_vocab_size(with_added_tokens=False)
    splits = [
        {key: value for key, value in spec.items() if key != "trim_offsets"}
        for spec in components(rust.pre_tokenizer)
    ]
    return (
        type(model).__name__ == "BPE"
        and not (model.dropout or model.unk_token or model.fuse_unk or model.byte_fallback)
        and not (model.continuing_subword_prefix or model.end_of_word_suffix or model.ignore_merges)
        and [spec["type"] for spec in components(rust.normalizer)] == ["NFC"]
        and splits == [
            {"type": "Split", "pattern": {"Regex": QWEN_PATTERN}, "behavior": "Isolated",
             "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]
        and not config.get("add_prefix_space")
        and sorted(plain.added_tokens_decoder) == list(range(size, rust.get_vocab_size()))
        and {"eos_token", "pad_token", "unk_token"} <= config.keys()
    )  # fmt: skip

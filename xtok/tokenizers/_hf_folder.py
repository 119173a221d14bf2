"""Hugging Face folders and repos with a `tokenizer.json`: what AutoTokenizer loads from them.

Importing Transformers takes seconds, so the `tokenizers` library reads `tokenizer.json` alone where
AutoTokenizer would not change what it says. That is known if all of this holds; if not,
Transformers decides:

- The installed Transformers is of a version that this rule was checked with.
- For the `model_type` in `config.json` and the class in `tokenizer_config.json`, AutoTokenizer
  takes `tokenizer.json` as it is; or it builds a Qwen2Tokenizer, GemmaTokenizer, LlamaTokenizer or
  GPT2Tokenizer around its vocabulary and merges, which is done here as these classes do it.
- `tokenizer_config.json` has only keys that change neither tokens nor how text is encoded.
- The added and special tokens that it lists are those of `tokenizer.json`, flags included.
- No other file lists tokens or chat templates, and `tokenizer.json` neither pads nor truncates.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from xtok.errors import TokenizerError
from xtok.tokenizers._backend import SPECIAL_NAMES, chat_templates
from xtok.tokenizers._hf import HuggingFaceBackend, components
from xtok.tokenizers._tiktoken import QWEN_PATTERN, TEKKEN_PATTERN
from xtok.tokenizers.hub import ModelFiles, hub_answers, quiet_hub

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as RustTokenizer


def load_folder(files: ModelFiles, *, trust_remote_code: bool = False) -> HuggingFaceBackend:
    """Load what `AutoTokenizer` loads from a folder or repo.

    Raises:
        TokenizerError: if that fails, gives a slow tokenizer, or needs code that is not trusted.
    """
    plain = None if trust_remote_code else _read_alone(files)
    backend = HuggingFaceBackend(plain or _by_transformers(files, trust_remote_code), str(files))
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


def load_json(path: Path) -> HuggingFaceBackend:
    """Load a `tokenizer.json` alone.

    Raises:
        TokenizerError: if it is not one.
    """
    try:
        plain = PlainTokenizer(path)
        plain.backend_tokenizer.no_truncation()
        plain.backend_tokenizer.no_padding()
    except Exception as error:
        raise TokenizerError(
            f"{path} is JSON, but neither a tokenizer.json nor a tekken file: {error}",
            hint="give a tokenizer's file, or the folder of a Hugging Face tokenizer",
        ) from error
    return HuggingFaceBackend(plain, str(path))


class PlainTokenizer:
    """What `HuggingFaceBackend` uses of a `PreTrainedTokenizerFast`, without Transformers.

    Raises:
        Exception: as the `tokenizers` library does, if the file is not a `tokenizer.json`.
    """

    chat_template: Mapping[str, str] = {}

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as RustTokenizer

        self.backend_tokenizer = RustTokenizer.from_file(str(path))

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return self.backend_tokenizer.get_added_tokens_decoder()

    def __call__(self, texts: list[str], **_: bool) -> dict[str, list[Any]]:
        """Encode whole texts as they are, without further special tokens."""
        encodings = self.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        return {
            "input_ids": [encoding.ids for encoding in encodings],
            "offset_mapping": [encoding.offsets for encoding in encodings],
        }


# By a model's type, "" without a config.json: the classes for which AutoTokenizer takes
# tokenizer.json as it is, and those that build around its vocabulary and merges (_PARTS). From
# models/auto/tokenization_auto.py and the classes' own files of transformers 5.8.1, 5.12.1, 5.16.1,
# 5.20.2 and 5.23.0. Some versions before lose DeepSeek's spaces
# (https://github.com/huggingface/transformers/issues/45488).
_PLAIN = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
_LLAMA = frozenset({"LlamaTokenizer", "LlamaTokenizerFast"})
_DEEPSEEK_TYPES = ("deepseek_v2", "deepseek_v3")
_MISTRAL_TYPES = ("mistral", "mixtral", "mistral3", "ministral3")
_QWEN_TYPES = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
_GEMMA_TYPES = ("gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text")
_CLASSES = {
    **dict.fromkeys(("", "llama", "llama4", "gpt_oss", "glm4_moe", "nemotron_h"), _PLAIN),
    **dict.fromkeys((*_DEEPSEEK_TYPES, *_MISTRAL_TYPES), _PLAIN | _LLAMA),
}
_BUILT = {
    **dict.fromkeys(_QWEN_TYPES, "Qwen2Tokenizer"),
    **dict.fromkeys(_GEMMA_TYPES, "GemmaTokenizer"),
    "llama": "LlamaTokenizer",
    "gpt2": "GPT2Tokenizer",
}


class _Parts(NamedTuple):
    """What a class of Transformers builds around the vocabulary and merges of a BPE."""

    normalizer: Any
    pre_tokenizer: Any
    decoder: Any
    special: Mapping[str, str]  # the tokens that the class gives roles where the config does not
    unk_token: str | None = None
    fuse_unk: bool = False
    byte_fallback: bool = False


def _parts_of(name: str, config: Mapping[str, Any]) -> _Parts:
    """Return what a class builds: `models/*/tokenization_*.py` of transformers 5.23.0."""
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    ends = dict.fromkeys(("eos_token", "unk_token"), "<|endoftext|>")
    if name == "Qwen2Tokenizer":
        space = bool(config.get("add_prefix_space"))
        split = pre_tokenizers.Split(Regex(QWEN_PATTERN), behavior="isolated")
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=False)
        pre = pre_tokenizers.Sequence([split, as_bytes])
        special = {**ends, "pad_token": "<|endoftext|>"}
        return _Parts(normalizers.NFC(), pre, decoders.ByteLevel(), special)
    if name == "GPT2Tokenizer":
        space = bool(config.get("add_prefix_space"))
        pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
        special = {**ends, "bos_token": "<|endoftext|>"}
        return _Parts(None, pre_tokenizer, decoders.ByteLevel(), special)
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if name == "GemmaTokenizer":
        special = {f"{role}_token": f"<{role}>" for role in ("unk", "bos", "eos", "pad", "mask")}
        unknown = _content(config.get("unk_token", "<unk>"))
        split = pre_tokenizers.Split(" ", behavior="merged_with_previous")
        spaces = normalizers.Replace(" ", "▁")
        return _Parts(spaces, split, decoders.Sequence(decoder), special, unknown, True, True)
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    space = config.get("add_prefix_space") is not False
    if space:
        decoder.append(decoders.Strip(content=" ", left=1))
    scheme = ("always" if config.get("legacy") else "first") if space else "never"
    marks = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    return _Parts(None, marks, decoders.Sequence(decoder), special, None, True, True)


_NAMES = frozenset(f"{role}_token" for role in SPECIAL_NAMES)
_EXTRA = ("additional_special_tokens", "extra_special_tokens")
_HARMLESS = {  # about decoding, lengths, the ends of a text; or for slow tokenizers alone
    *("add_bos_token", "add_eos_token", "backend", "chat_template", "clean_up_tokenization_spaces"),
    *("errors", "is_local", "legacy", "local_files_only", "model_input_names", "model_max_length"),
    *("padding_side", "processor_class", "sp_model_kwargs", "spaces_between_special_tokens"),
    *("truncation_side", "use_default_system_prompt"),
}
_CHECKED = {"added_tokens_decoder", "add_prefix_space", "split_special_tokens", "tokenizer_class"}
_KEYS = {*_EXTRA, *_HARMLESS, *_CHECKED}
_FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def is_checked() -> bool:
    """Tell whether the installed Transformers is of a version that the rule was checked with."""
    return (5, 8) <= tuple(map(int, version("transformers").split(".")[:2])) < (6, 0)


def _read_alone(files: ModelFiles) -> PlainTokenizer | None:
    """Read a folder by its `tokenizer.json`; None where Transformers must decide."""
    if not is_checked():
        return None
    try:
        path, config = files.find("tokenizer.json"), files.json("tokenizer_config.json")
        model = files.json("config.json") if files.find("config.json") else {"model_type": ""}
        model_type = str(model.get("model_type"))
        if path is None or not _configs_allow(files, config, model_type):
            return None
        templates = chat_templates(files)
        plain = PlainTokenizer(path)
    except Exception as error:
        # What is missing or damaged, also for the library: Transformers has its own answer.
        if type(error) is not Exception and not isinstance(error, files.error):
            raise
        return None
    built = config.get("tokenizer_class") not in _PLAIN and model_type in _BUILT
    parts = _parts_of(_BUILT[model_type], config) if built else None
    if not (all(templates.values()) and _tokens_allow(plain, config, model_type, parts)):
        return None
    plain.chat_template = templates
    roles = _with_roles(config, parts)
    if parts is not None:
        _build(plain.backend_tokenizer, parts, set(roles.values()))
    for name, token in roles.items():
        setattr(plain, f"{name}_id", plain.backend_tokenizer.token_to_id(token))
    return plain


def _with_roles(config: Mapping[str, Any], parts: _Parts | None) -> dict[str, str]:
    """Return the special tokens that have a role: the class's, unless the config has another."""
    named = {**(parts.special if parts else {}), **{k: config[k] for k in _NAMES if k in config}}
    return {name: _content(token) for name, token in named.items() if token is not None}


def _build(rust: RustTokenizer, parts: _Parts, special: set[str]) -> None:
    """Build what a class builds, and make special what has a role."""
    rust.normalizer, rust.pre_tokenizer = parts.normalizer, parts.pre_tokenizer
    rust.decoder, model = parts.decoder, rust.model
    model.unk_token, model.fuse_unk = parts.unk_token, parts.fuse_unk
    model.byte_fallback, model.dropout, model.ignore_merges = parts.byte_fallback, None, False
    for token in rust.get_added_tokens_decoder().values():
        if token.content in special and not token.special:
            token.special = True
            rust.add_special_tokens([token])


def _configs_allow(files: ModelFiles, config: Mapping[str, Any], model_type: str) -> bool:
    """Tell whether the configs, and which files there are, leave it to `tokenizer.json`."""
    name = config.get("tokenizer_class")
    built = _BUILT.get(model_type)
    if name is None and built != "LlamaTokenizer":  # the type's own
        name = None if "tokenizer_class" in files.json("config.json") else built
    keys = {key for key, value in config.items() if not _is_token(key, value)}
    return (
        name is not None
        and (name in _CLASSES.get(model_type, ()) or str(name).removesuffix("Fast") == built)
        and keys <= _KEYS
        and not config.get("split_special_tokens")
        and not (model_type in _MISTRAL_TYPES and find_spec("mistral_common"))
        and ("added_tokens_decoder" in config or not _old_files_change(files, config))
        and not files.has("additional_chat_templates")
    )


def _old_files_change(files: ModelFiles, config: Mapping[str, Any]) -> bool:
    """Tell whether what is read where the config does not list the tokens says something else."""
    old = files.json("special_tokens_map.json").items()
    same = all(k in _NAMES and _content(v) == _content(config.get(k)) for k, v in old)
    return not same or files.find("added_tokens.json") is not None


def _is_token(key: str, value: Any) -> bool:
    """Tell whether an entry names a special token: one of the roles, or one of the model's own."""
    return key in _NAMES or (key.endswith("_token") and isinstance(value, str))


def _tokens_allow(
    plain: PlainTokenizer, config: Mapping[str, Any], model_type: str, parts: _Parts | None
) -> bool:
    """Tell whether the config lists the tokens of `tokenizer.json`, and the class can be built."""
    added = plain.added_tokens_decoder
    listed = {str(i): {flag: getattr(t, flag) for flag in _FLAGS} for i, t in added.items()}
    special = {token.content for token in added.values() if token.special}
    named = [t for k, t in config.items() if _is_token(k, t) and t is not None]
    for key in _EXTRA:
        extra = config.get(key) or []
        named += extra.values() if isinstance(extra, dict) else extra
    if parts is not None:  # a class makes special what has a role
        roles = set(_with_roles(config, parts).values())
        special |= roles & {token.content for token in added.values()}
        named += roles
    rust = plain.backend_tokenizer
    byte_level = type(rust.decoder).__name__ == "ByteLevel"
    return (
        rust.padding is None
        and rust.truncation is None
        and config.get("added_tokens_decoder", listed) == listed
        and special.issuperset(map(_content, named))
        and (model_type not in _DEEPSEEK_TYPES or byte_level)
        and not (parts is not None and _BUILT[model_type] == "LlamaTokenizer" and byte_level)
        and (parts is None or _fits(plain, parts))
    )


def _content(token: Any) -> str:
    """Return a special token's text, which may be given with its flags."""
    return str(token.get("content") if isinstance(token, dict) else token)


def _fits(plain: PlainTokenizer, parts: _Parts) -> bool:
    """Tell whether a class makes of `tokenizer.json` what `_build` does.

    A class takes vocabulary and merges of a BPE, and numbers the added tokens that the vocabulary
    lacks from its end.
    """
    rust, added = plain.backend_tokenizer, plain.added_tokens_decoder
    model, size = rust.model, rust.get_vocab_size(with_added_tokens=False)
    if type(model).__name__ != "BPE":
        return False
    new = [i for i, token in sorted(added.items()) if model.token_to_id(token.content) != i]
    is_normalized = any(token.normalized for token in added.values())
    return (
        not (model.continuing_subword_prefix or model.end_of_word_suffix)
        and new == list(range(size, rust.get_vocab_size()))
        and not (
            is_normalized
            and list(components(parts.normalizer)) != list(components(rust.normalizer))
        )
    )

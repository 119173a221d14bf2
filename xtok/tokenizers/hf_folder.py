"""Read Hugging Face folders and repos with the same results as AutoTokenizer.

Importing Transformers is slow: building a map from two folders takes 5 s with Transformers, and 2.5
s without Transformers, on two busy cores. Therefore, xtok reads `tokenizer.json` with the
`tokenizers` library, without Transformers, if all of the following conditions hold:

- AutoTokenizer uses `tokenizer.json` unchanged for this `model_type` and tokenizer class. Or the
  class takes only the vocabulary and merges from `tokenizer.json`, and a fingerprint shows that all
  other parts in the file are equal to the parts that the class builds.
- No key in `tokenizer_config.json` affects tokens or encoding.
- `tokenizer_config.json` and `tokenizer.json` have the same added and special tokens, with the same
  flags.
- No other file lists tokens, and `tokenizer.json` neither pads nor truncates.

Otherwise, Transformers loads the folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from xtok.errors import TokenizerError
from xtok.tokenizers._backend import SPECIAL_NAMES, chat_templates
from xtok.tokenizers._hf import HuggingFaceBackend, components
from xtok.tokenizers._sentencepiece import SentencePieceBackend
from xtok.tokenizers._tiktoken import TEKKEN_PATTERN
from xtok.tokenizers.hub import ModelFiles, quiet_hub

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer


def load_folder(
    files: ModelFiles, path: Path, *, trust_remote_code: bool = False
) -> HuggingFaceBackend:
    """Load a folder or repo like `AutoTokenizer`. `path` is its vocabulary file."""
    plain = None if trust_remote_code else without_library(files)
    by_transformers = partial(_by_transformers, files, path.name, trust_remote_code)
    backend = HuggingFaceBackend(plain or by_transformers(), str(files))
    backend.load_library = by_transformers if plain else None
    readers = {".json": load_json, ".model": SentencePieceBackend.from_file}
    if plain is None and path.suffix in readers:
        backend.other = f"{path.name} alone", partial(readers[path.suffix], path)
    notes = _notes(backend, files, path.name, trust_remote_code and runs_code(files))
    backend.notes = (*backend.notes, *notes)
    return backend


def _notes(
    backend: HuggingFaceBackend, files: ModelFiles, name: str, has_run: bool
) -> Iterator[str]:
    if has_run:
        revision = files.commit or files.revision
        suffix = f" at {revision}" if revision else ""
        yield f"xtok ran the tokenizer code of {files}{suffix}, with your permission"
    if backend.byte_level_splits() not in (None, TEKKEN_PATTERN) and _is_old_mistral(files):
        yield (
            f"Transformers reports that the split pattern in tokenizer.json of {files} is wrong; "
            'to replace the pattern, add "fix_mistral_regex": true to the tokenizer_config.json'
        )
    if _is_mistral_common(files) and files.find("tekken.json"):
        yield (
            f"xtok reads the {name} of {files}, but AutoTokenizer reads the tekken.json, because "
            "mistral-common is installed"
        )


def hint_without_fast(files: ModelFiles) -> str | None:
    """Return a hint for ByT5 and CANINE, which have no fast tokenizer, or None for others."""
    config = files.json("config.json")
    name = files.json("tokenizer_config.json").get("tokenizer_class")
    name = str(name or config.get("tokenizer_class") or config.get("model_type")).lower()
    if name.startswith("byt5"):
        return "use bytes, and add 3 to all ids, because the first 3 ids of ByT5 are special tokens"
    if name.startswith("canine"):
        return "use another model; CANINE has no fast tokenizer, because its ids are code points"
    return None


def _by_transformers(files: ModelFiles, file: str, trust_remote_code: bool) -> Any:
    """Load a folder with Transformers, and convert errors to a `TokenizerError`."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    files.json("tokenizer_config.json")  # raises if the file is not a JSON object
    local = files.offline or (isinstance(files.model, str) and files.is_local)
    # For the types in `_MISTRAL_COMMON_TYPES`, use the class that AutoTokenizer would use without
    # mistral-common.
    loader: Any = PreTrainedTokenizerFast if _is_mistral_common(files) else AutoTokenizer
    try:
        with quiet_hub():
            tokenizer = loader.from_pretrained(
                files.model,
                revision=files.commit or files.revision,
                local_files_only=local,
                use_fast=True,
                trust_remote_code=trust_remote_code,
            )
        # Transformers replaces an unknown token by unk_token. If unk_token is unknown too, the
        # lookup never ends.
        if getattr(tokenizer, "unk_token", None) == "" and "" not in tokenizer.get_vocab():
            raise ValueError("unk_token is an empty string")
    except PermissionError:  # the caller reports the problem
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise TokenizerError(
                f"{files} requires custom tokenizer code",
                hint="review the code, then allow the code with {option}; or pass the path of the "
                "model's tokenizer.json, if available",
                parameter="trust_remote_code",
            ) from error
        raise TokenizerError(
            f"AutoTokenizer cannot load {files}: {error}",
            hint=f"check {file} and tokenizer_config.json, or download both files again"
            + f"; or give the path of {file}" * file.endswith(".model"),
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise TokenizerError(
            f"{files} has a slow tokenizer ({type(tokenizer).__name__}), expected a fast tokenizer",
            hint=hint_without_fast(files)
            or "save a fast tokenizer with AutoTokenizer.from_pretrained(...).save_pretrained(...)",
        )
    return tokenizer


def _is_mistral_common(files: ModelFiles) -> bool:
    """Whether AutoTokenizer returns mistral-common's tokenizer, which cannot list its tokens."""
    model_type = str(files.json("config.json").get("model_type"))
    return model_type in _MISTRAL_COMMON_TYPES and find_spec("mistral_common") is not None


def _is_old_mistral(files: ModelFiles) -> bool:
    """Whether Transformers recommends `fix_mistral_regex` (in `_patch_mistral_regex`)."""
    config = files.json("config.json")
    saved_by = str(config.get("transformers_version") or "0").partition(".")[0]
    types = ("mistral", "mistral3", "voxtral", "ministral", "pixtral")
    return config.get("model_type") in types and saved_by in "01234"


def runs_code(files: ModelFiles) -> bool:
    """Whether a folder's tokenizer requires custom code."""
    return "auto_map" in files.json("tokenizer_config.json")


def load_json(path: Path) -> HuggingFaceBackend:
    """Load a `tokenizer.json`, and ignore the other files in its folder."""
    try:
        plain = PlainTokenizer(path)
        plain.backend_tokenizer.no_truncation()
        plain.backend_tokenizer.no_padding()
    except Exception as error:
        raise TokenizerError(
            f"{path} is JSON, but neither a tokenizer.json nor a tekken file: {error}",
            hint="give a tokenizer file or the folder of a Hugging Face tokenizer",
        ) from error
    return HuggingFaceBackend(plain, str(path))


class PlainTokenizer:
    """A minimal replacement for `PreTrainedTokenizerFast` that does not import Transformers."""

    chat_template: Mapping[str, str] = {}
    special_tokens_map: Mapping[str, str] = {}

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as RustTokenizer

        # `from_file` rejects file names that are not UTF-8.
        self.backend_tokenizer = RustTokenizer.from_buffer(path.read_bytes())

    def __call__(self, texts: list[str], **_: bool) -> dict[str, list[Any]]:
        """Encode whole texts without special tokens."""
        encodings = self.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        return {
            "input_ids": [encoding.ids for encoding in encodings],
            "offset_mapping": [encoding.offsets for encoding in encodings],
        }


class Built(NamedTuple):
    """A class that builds all parts of a BPE tokenizer except the vocabulary and the merges."""

    fingerprint: str
    roles: Mapping[str, str]  # default special tokens of the class


_END = "<|endoftext|>"
BUILT = {
    "Qwen2Tokenizer": Built(
        "a1be49115e45afa453d8d700d94e803ec61f80b1bc47039735cd841291c7a1ee",
        {"unk_token": _END, "eos_token": _END, "pad_token": _END},
    ),
    "GPT2Tokenizer": Built(
        "1ff2a6f2b704983f29d8309658b8baf66a2b129f17ef8557a463b790fc8b7842",
        {"unk_token": _END, "bos_token": _END, "eos_token": _END},
    ),
    "GemmaTokenizer": Built(
        "37fdf32766b47947e25b65b812cc2f06ff65f692d300162ea24e89f0cfebd1c3",
        {f"{role}_token": f"<{role}>" for role in ("unk", "bos", "eos", "pad", "mask")},
    ),
    "LlamaTokenizer": Built(
        "047d4f60300213beaf476cf33779a9e104a2741384a27b548d6025011f6ee430",
        {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    ),
}
"""Classes that read only the vocabulary and merges of `tokenizer.json`."""

# The keys of `READ_DIRECTLY` and `BUILDERS` are model types, or "" for a folder without
# config.json. `READ_DIRECTLY` contains the classes for which AutoTokenizer uses tokenizer.json
# unchanged. `BUILDERS` contains the class in `BUILT` that AutoTokenizer uses. Transformers before
# 5.8 uses other classes, and some versions lose DeepSeek's spaces
# (https://github.com/huggingface/transformers/issues/45488). `tests/tokenizers/test_hf_folder.py`
# compares the tables with the installed version of Transformers.
_SINCE = (5, 8)
_PLAIN = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
_LLAMA = frozenset({"LlamaTokenizer", "LlamaTokenizerFast"})
_DEEPSEEK_TYPES = ("deepseek_v2", "deepseek_v3")
_MISTRAL_TYPES = ("mistral", "mixtral", "mistral3", "ministral3")
_MISTRAL_COMMON_TYPES = frozenset(_MISTRAL_TYPES) | {
    *("ministral", "mistral_large4", "pixtral", "voxtral", "voxtral_realtime")
}
_QWEN_TYPES = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
_GEMMA_TYPES = ("gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text")
READ_DIRECTLY = {
    **dict.fromkeys(("", "llama", "llama4", "gpt_oss", "glm4_moe", "nemotron_h"), _PLAIN),
    **dict.fromkeys((*_DEEPSEEK_TYPES, *_MISTRAL_TYPES), _PLAIN | _LLAMA),
}
BUILDERS = {
    **dict.fromkeys(_QWEN_TYPES, "Qwen2Tokenizer"),
    **dict.fromkeys(_GEMMA_TYPES, "GemmaTokenizer"),
    "llama": "LlamaTokenizer",
    "gpt2": "GPT2Tokenizer",
}

_ROLES = frozenset(f"{role}_token" for role in SPECIAL_NAMES)
_EXTRA = ("additional_special_tokens", "extra_special_tokens")
_KEYS = {
    *("added_tokens_decoder", "add_prefix_space", "split_special_tokens", "tokenizer_class"),
    *_EXTRA,
    # Keys that affect only decoding, lengths, tokens around a text, or slow tokenizers.
    *("add_bos_token", "add_eos_token", "backend", "chat_template", "clean_up_tokenization_spaces"),
    *("errors", "is_local", "legacy", "local_files_only", "model_input_names", "model_max_length"),
    *("padding_side", "processor_class", "sp_model_kwargs", "spaces_between_special_tokens"),
    *("truncation_side", "use_default_system_prompt"),
}
_FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def can_read_alone() -> bool:
    """Whether the tables in this module apply to the installed version of Transformers."""
    return tuple(map(int, version("transformers").split(".")[:2])) >= _SINCE


def without_library(files: ModelFiles) -> PlainTokenizer | None:
    """Read a folder's `tokenizer.json`, or return None if Transformers must load the folder."""
    if not can_read_alone():
        return None
    try:
        return _read_plain(files)
    except Exception as error:
        # Files are missing or damaged. The caller uses Transformers, which raises an error.
        if type(error) not in (Exception, ValueError) and not isinstance(error, files.error):
            raise
        return None


def _read_plain(files: ModelFiles) -> PlainTokenizer | None:
    """Read `tokenizer.json` if the conditions in the module's docstring hold."""
    path, config = files.find("tokenizer.json"), files.json("tokenizer_config.json")
    model = files.json("config.json") if files.find("config.json") else {"model_type": ""}
    name = _class(config, model)
    if path is None or name is None or not _configs_allow(files, config):
        return None
    templates = chat_templates(files)
    plain, roles = PlainTokenizer(path), _roles(name, config)
    rust, extra = plain.backend_tokenizer, config.get("extra_special_tokens")
    if not (
        all(templates.values())
        and _builds(name, str(model["model_type"]), config, roles, rust)
        and _tokens_allow(rust, config, roles)
    ):
        return None
    plain.chat_template = templates
    plain.special_tokens_map = {
        **{k: v for k, v in config.items() if _is_token(k, v) and k not in _ROLES},
        **(extra if isinstance(extra, dict) else {}),
    }
    for key in _ROLES:
        token_id = rust.token_to_id(roles[key]) if key in roles else None
        setattr(plain, f"{key}_id", token_id)
    return plain


def _roles(name: str, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens of the class and the config by key, such as `bos_token`."""
    roles = dict(BUILT[name].roles if name in BUILT else {})
    roles |= {key: config[key] for key in _ROLES if key in config}
    return {key: _content(token) for key, token in roles.items() if token is not None}


def _class(config: Mapping[str, Any], model: Mapping[str, Any]) -> str | None:
    """Return the class that AutoTokenizer uses for a folder's configs, or None if uncertain."""
    model_type, name = str(model.get("model_type")), config.get("tokenizer_class")
    builder = BUILDERS.get(model_type)
    if not isinstance(name, str | None):
        return None
    if name is None and "tokenizer_class" not in model and builder != "LlamaTokenizer":
        return builder
    if name in READ_DIRECTLY.get(model_type, ()):
        return "TokenizersBackend"
    return builder if str(name).removesuffix("Fast") == builder else None


def _configs_allow(files: ModelFiles, config: Mapping[str, Any]) -> bool:
    old = ("special_tokens_map.json", "added_tokens.json")  # used if the config has no tokens
    return (
        all(key in _KEYS or _is_token(key, value) for key, value in config.items())
        and all(isinstance(config.get(key) or [], list | dict) for key in _EXTRA)
        and not config.get("split_special_tokens")
        and ("added_tokens_decoder" in config or not any(map(files.find, old)))
    )


def _is_token(key: str, value: Any) -> bool:
    """Whether a config entry is a special token: a token with a role, or another `…_token`."""
    return key in _ROLES or (key.endswith("_token") and isinstance(value, str))


def _content(token: Any) -> str:
    return str(token.get("content") if isinstance(token, dict) else token)


def _tokens_allow(rust: RustTokenizer, config: Mapping[str, Any], roles: Mapping[str, str]) -> bool:
    """Mark tokens with a role as special, and compare the added tokens with the config.

    Returns True if the added tokens are equal and `tokenizer.json` neither pads nor truncates.
    """
    added = rust.get_added_tokens_decoder()
    listed = {str(i): {flag: getattr(t, flag) for flag in _FLAGS} for i, t in added.items()}
    for token in added.values():
        if token.content in roles.values() and not token.special:
            token.special = True
            rust.add_special_tokens([token])
    return (
        rust.padding is None
        and rust.truncation is None
        and config.get("added_tokens_decoder", listed) == listed
        and {*_names(config), *roles.values()} <= {t.content for t in added.values() if t.special}
    )


def _names(config: Mapping[str, Any]) -> Iterator[str]:
    yield from (_content(v) for k, v in config.items() if _is_token(k, v) and v is not None)
    for key in _EXTRA:
        extra = config.get(key) or []
        yield from map(_content, extra.values() if isinstance(extra, dict) else extra)


def _builds(
    name: str,
    model_type: str,
    config: Mapping[str, Any],
    roles: Mapping[str, str],
    rust: RustTokenizer,
) -> bool:
    """Whether a tokenizer class would build the tokenizer that `tokenizer.json` contains."""
    if name not in BUILT:
        return model_type not in _DEEPSEEK_TYPES or type(rust.decoder).__name__ == "ByteLevel"
    model, size = rust.model, rust.get_vocab_size(with_added_tokens=False)
    added = sorted(rust.get_added_tokens_decoder().items())
    new = [i for i, token in added if model.token_to_id(token.content) != i]
    return (
        config.get("add_prefix_space") in (None, name == "LlamaTokenizer")
        and not config.get("legacy")
        and fingerprint(rust) == BUILT[name].fingerprint
        and getattr(model, "unk_token", None) in (None, roles.get("unk_token"))
        and new == list(range(size, rust.get_vocab_size()))
    )


def fingerprint(rust: RustTokenizer) -> str:
    """Return the sha256 of the normalizer, pre-tokenizer, decoder and options of the model."""
    normalizer, splits, decoder = (
        list(components(part)) for part in (rust.normalizer, rust.pre_tokenizer, rust.decoder)
    )
    parts = [
        normalizer,
        [{key: c[key] for key in c if key != "trim_offsets"} for c in splits],
        [c["type"] if c["type"] == "ByteLevel" else c for c in decoder],
        [
            type(rust.model).__name__,
            *(getattr(rust.model, name, None) or None for name in _OF_MODEL),
        ],
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


_OF_MODEL = (
    *("unk_token", "fuse_unk", "byte_fallback", "dropout", "ignore_merges"),
    *("continuing_subword_prefix", "end_of_word_suffix"),
)

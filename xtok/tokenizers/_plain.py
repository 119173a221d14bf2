"""Folders whose `tokenizer.json` is all that `AutoTokenizer` would read: no transformers needed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from xtok.errors import TokenizerError
from xtok.tokenizers._files import ModelFiles

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as RustTokenizer

SPECIAL_NAMES = ("bos", "eos", "pad", "unk", "mask", "sep", "cls")
"""The roles that `tokenizer_config.json` gives to tokens, each as `bos_token` and the like."""

_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
# What in a tokenizer_config.json does not change how text becomes ids.
_HARMLESS = {
    *("tokenizer_class", "backend", "is_local", "local_files_only", "name_or_path"),
    *("model_max_length", "max_length", "clean_up_tokenization_spaces", "chat_template"),
    *("model_input_names", "padding_side", "truncation_side", "added_tokens_decoder"),
    *(f"{role}_token" for role in SPECIAL_NAMES),
}
_LEGACY = ("config.json", "special_tokens_map.json", "added_tokens.json")


class Plain(NamedTuple):
    """A tokenizer as its file has it: its added tokens by id, and role to id."""

    rust: RustTokenizer
    added: dict[int, AddedToken]
    roles: dict[str, int]


def load_plain(files: ModelFiles) -> Plain | None:
    """Load a local folder's `tokenizer.json`; None if anything else could have a say.

    `AutoTokenizer` chooses a class by `config.json` and by `tokenizer_class`; the generic one loads
    the file as it stands, and adds the special tokens that the config names and the file lacks.
    Where there is nothing to choose and nothing to add, loading the file is the same, and saves the
    two seconds that transformers takes to import.

    Raises:
        TokenizerError: if the file is damaged.
    """
    if not isinstance(files.model, Path) or any(files.find(name) for name in _LEGACY):
        return None
    config = files.json("tokenizer_config.json")
    if config.get("tokenizer_class") not in _GENERIC or not config.keys() <= _HARMLESS:
        return None
    from tokenizers import Tokenizer as RustTokenizer

    try:
        rust = RustTokenizer.from_file(str(files.model / "tokenizer.json"))
    except Exception as error:
        raise TokenizerError(
            f"{files} is not a tokenizer that AutoTokenizer loads: {error}",
            hint="check its tokenizer.json and tokenizer_config.json, or fetch them again",
        ) from error
    added = dict(rust.get_added_tokens_decoder())
    roles = _roles(config, added)
    if roles is None or not _as_listed(config.get("added_tokens_decoder"), added):
        return None
    return Plain(rust, added, roles)


def _roles(config: dict[str, Any], added: dict[int, AddedToken]) -> dict[str, int] | None:
    """Return role to id; None if a token that the config names is no special token of the file."""
    ids = {token.content: i for i, token in added.items() if token.special}
    named = {role: config.get(f"{role}_token") for role in SPECIAL_NAMES}
    given = {role: name for role, name in named.items() if name is not None}
    if not all(isinstance(name, str) and name in ids for name in given.values()):
        return None
    return {role: ids[name] for role, name in given.items()}


_FIELDS = ("content", "special", "normalized", "lstrip", "rstrip", "single_word")


def _as_listed(listed: Any, added: dict[int, AddedToken]) -> bool:
    """Tell whether the config lists no added tokens, or exactly those of the file."""
    if listed is None:
        return True
    found = {str(i): {name: getattr(t, name) for name in _FIELDS} for i, t in added.items()}
    return bool(listed == found)

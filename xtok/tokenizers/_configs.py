"""What the configs beside a tokenizer say."""

from __future__ import annotations

from contextlib import suppress

from xtok.errors import TokenizerError
from xtok.tokenizers.hub import ModelFiles

SPECIAL_NAMES = ("bos", "eos", "pad", "unk", "mask", "sep", "cls")
"""The roles that `tokenizer_config.json` gives to tokens, each as `bos_token` and the like."""


def model_vocab_size(files: ModelFiles) -> int | None:
    """Return the width that config.json gives; None without a config.json.

    Read from the file if it is there, so that a model of a new or custom type needs no code; else
    the default of its type, from transformers' `get_text_config().vocab_size`.

    Raises:
        TokenizerError: if there is none.
    """
    if files.find("config.json") is None:
        return None
    config = files.json("config.json")
    for part in (config.get("text_config"), config):
        if isinstance(part, dict) and isinstance(size := part.get("vocab_size"), int):
            return size
    from transformers import AutoConfig

    try:
        loaded = AutoConfig.from_pretrained(
            files.model,
            revision=files.commit or files.revision,
            local_files_only=files.offline,
            trust_remote_code=False,
        )
        return int(loaded.get_text_config().vocab_size)
    except Exception as error:
        raise TokenizerError(
            f"the config.json of {files} has no vocabulary size: {error}",
            hint="give the width of the model's logits with {option}",
            parameter="vocab_size",
        ) from error


def eos_ids(files: ModelFiles) -> list[int]:
    """Return the ids that the generation config ends a text with.

    Raises:
        TokenizerError: if it is not a JSON object, or these are not ids.
    """
    name = "generation_config.json"
    ids: list[int] | None = None
    with suppress(TokenizerError):
        eos = files.json(name).get("eos_token_id")
        ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if ids is None or not all(isinstance(i, int) for i in ids):
        raise TokenizerError(
            f"{files.find(name)} is not a generation config", hint="fix it, or remove it"
        )
    return ids

"""Find and read the input-embedding layer of a checkpoint."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from xtok.errors import EmbeddingError
from xtok.tokenizers.checkpoint import Checkpoint, read_tensor

# Names of the layer in Transformers checkpoints, the most common first
_NAMES = (
    "model.embed_tokens.weight", "transformer.wte.weight", "embeddings.word_embeddings.weight",
    "model.language_model.embed_tokens.weight", "language_model.model.embed_tokens.weight",
    "model.text_model.embed_tokens.weight", "embed_tokens.weight", "wte.weight",
    "bert.embeddings.word_embeddings.weight", "roberta.embeddings.word_embeddings.weight",
    "distilbert.embeddings.word_embeddings.weight", "model.embeddings.tok_embeddings.weight",
    "embeddings.tok_embeddings.weight", "model.tok_embeddings.weight",
    "model.word_embeddings.weight", "model.decoder.embed_tokens.weight",
    "transformer.word_embeddings.weight", "word_embeddings.weight",
    "transformer.embedding.word_embeddings.weight", "transformer.embd.wte.weight",
    "gpt_neox.embed_in.weight", "embed_in.weight", "backbone.embeddings.weight",
    "backbone.embedding.weight", "shared.weight",
)  # fmt: skip
_OUTPUT_NAME = "lm_head.weight"  # the same matrix, if config.json ties input and output layers


def input_layer(model: Checkpoint) -> tuple[str, NDArray[np.float32]]:
    """Return the name and the weights, float32 `[rows, dim]`, of the input-embedding layer."""
    files = model.tensor_files()
    name = choose_layer(files, model)
    return name, np.asarray(read_tensor(model.shard(files[name]), name).float().numpy())


def choose_layer(names: Collection[str], model: Checkpoint) -> str:
    """Return the first known name of an input-embedding layer."""
    for name in _NAMES:
        if name in names:
            return name
    if _OUTPUT_NAME in names and model.json("config.json").get("tie_word_embeddings") is True:
        return _OUTPUT_NAME
    raise EmbeddingError(
        f"{model}: none of its {len(names)} tensors has a known input-embedding name",
        hint="use another model; known names include model.embed_tokens.weight, "
        "transformer.wte.weight and embeddings.word_embeddings.weight",
    )

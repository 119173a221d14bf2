"""Random models of Transformers with a few thousand parameters, not counting embeddings."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file

from xtok.tokenizers import Tokenizer, load_tokenizer


def tiny_model(
    width: int, *, seed: int, sharp: float = 0.02, dropout: float = 0.0, layers: int = 1,
    tied: bool = False,
) -> Any:  # fmt: skip
    """Return a causal language model; a larger `sharp` makes its distributions more peaked."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=width,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=sharp,
        attention_dropout=dropout,
        tie_word_embeddings=tied,
        eos_token_id=None,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def save_model(
    folder: Path, tokenizer: Tokenizer, source: Path, *, seed: int, sharp: float, layers: int = 1
) -> str:
    """Write a folder with a model and a Hugging Face tokenizer."""
    width = tokenizer.vocabulary.vocab_size
    model = tiny_model(width, seed=seed, sharp=sharp, layers=layers)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    return str(folder)


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all parameters."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def logged(trainer: Any, name: str = "loss") -> list[float]:
    """Return the values that a trainer has logged under a name."""
    return [line[name] for line in trainer.state.log_history if name in line]


def random_vectors(count: int, dimension: int, seed: int = 0) -> NDArray[np.float32]:
    random = np.random.default_rng(seed)
    return random.standard_normal((count, dimension), dtype=np.float32)


def with_layer(folder: Path, tokenizer: Path, matrix: NDArray[np.float32]) -> Path:
    """Write a model folder with only a tokenizer and an input-embedding layer."""
    shutil.copytree(tokenizer, folder)
    save_file({"model.embed_tokens.weight": matrix}, folder / "model.safetensors")
    return folder


def random_model(folder: Path, tokenizer: Path, size: int) -> Path:
    width = load_tokenizer(tokenizer).vocabulary.vocab_size
    return with_layer(folder, tokenizer, random_vectors(width, size, seed=size))

"""Random models of a few thousand parameters beside their embeddings, as a trainer loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from xtok.tokenizers import Tokenizer


def tiny_model(
    width: int, *, seed: int, sharp: float = 0.02, dropout: float = 0.0, layers: int = 1,
    tied: bool = False,
) -> Any:  # fmt: skip
    """Return a causal language model; with a larger `sharp`, its distributions are peaked."""
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
    """Return what a trainer has logged under a name."""
    return [line[name] for line in trainer.state.log_history if name in line]

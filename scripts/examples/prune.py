"""Cut a model to some of its layers, to get a small student for the study.

    python scripts/examples/prune.py data/models/smollm2-135m data/models/smollm2-135m-pruned

Embeddings, head and the selected layers are unchanged. The default keeps ten of SmolLM2's thirty
layers, mostly early ones. The result has 64 of 135 million parameters, predicts hardly better than
a uniform distribution, and can be healed in a few hundred steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

KEPT = (0, 1, 2, 5, 9, 13, 17, 21, 25, 29)


def main(argv: Sequence[str] | None = None) -> None:
    """Load, cut, and save with the tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="folder or repo id")
    parser.add_argument("output", type=Path, help="folder of the cut model")
    parser.add_argument("--layers", type=int, nargs="+", default=KEPT, help="default: %(default)s")
    args = parser.parse_args(argv)
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    layers = model.model.layers
    if not all(0 <= number < len(layers) for number in args.layers):
        parser.error(f"{args.model} has the layers 0 to {len(layers) - 1}")
    model.model.layers = torch.nn.ModuleList([layers[number] for number in args.layers])
    model.config.num_hidden_layers = len(args.layers)
    if types := getattr(model.config, "layer_types", None):
        model.config.layer_types = [types[number] for number in args.layers]
    model.save_pretrained(args.output)
    AutoTokenizer.from_pretrained(args.model).save_pretrained(args.output)
    count = sum(weight.numel() for weight in model.parameters())
    print(f"{args.output}: {len(args.layers)} of {len(layers)} layers, {count:,} parameters")


if __name__ == "__main__":
    main()

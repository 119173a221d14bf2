"""DistillKit's signal source and loss on the output of `xtok project --to distillkit`."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet
import torch
import yaml

from peer_checks import caches, report
from peer_checks.caches import Sample
from peer_checks.report import Check, Checks
from xtok.teachers.formats.caches import open_cache, read_cache

PEER = "DistillKit"


def checks(checkout: Path, work: Path) -> Checks:
    """Yield the lines about a checkout."""
    warnings.simplefilter("ignore")
    report.imported(checkout, "distillkit.signals")
    what = "`OfflineSignalSource`, `KLDLoss`"
    agree = partial(caches.agree, "distillkit", what, _loss, caches.tail_kl, work)
    yield from report.guarded(what, agree)
    yield from report.guarded("compressed rows", partial(_compressed, work))


def _loss(sample: Sample, shift: int) -> float:
    from distillkit.compression import DistributionQuantizationConfig, LogprobCompressor
    from distillkit.lossfuncs.common import MissingProbabilityHandling
    from distillkit.lossfuncs.kl import KLDLoss
    from distillkit.signals import OfflineSignalSource

    [row] = pyarrow.parquet.read_table(sample.path).to_pylist()
    config = yaml.safe_load(sample.path.with_name("compression_config.yaml").read_text())
    compressor = LogprobCompressor(config=DistributionQuantizationConfig(**config))
    source = OfflineSignalSource(compressor, vocab_size=sample.logits.shape[1])
    names = ("token_ids", "top_values")
    signal = source.get_signal({n: torch.tensor([row[n]]).roll(shift, 1) for n in names})
    num_rows = len(row["token_ids"])
    mask = torch.tensor([row["labels"][:num_rows]]) >= 0
    outputs = SimpleNamespace(logits=sample.logits[None, :num_rows])
    loss = KLDLoss(1.0, MissingProbabilityHandling.SYMMETRIC_UNIFORM)
    # Its sum has the rest of masked rows in it as well, so they are left out before.
    outputs.logits = outputs.logits[:, mask[0]]
    signal.sparse_ids, signal.sparse_values = (
        values[:, mask[0]] for values in (signal.sparse_ids, signal.sparse_values)
    )
    return float(loss(outputs, signal))


def _compressed(work: Path) -> Checks:
    """Rows that its compressor has packed, in the ways of its README, as we read them."""
    from distillkit.compression import DistributionQuantizationConfig, LogprobCompressor

    generator = torch.Generator().manual_seed(0)
    num_rows, vocab_size, k = 50, 5000, 64
    values = (2 * torch.randn(num_rows, vocab_size, generator=generator)).log_softmax(-1)
    logprobs, ids = values.topk(k)
    bins = [{"scale_dtype": "float16", "element_bits": 4, "num_elements": 16},
            {"scale_dtype": "float32", "element_bits": 1, "num_elements": 9}]  # fmt: skip
    configs = {
        "exact": {"exact_k": k, "residual_bins": [], "delta_encoding": False},
        "exact, bfloat16 deltas": {"exact_k": k, "exact_dtype": "bfloat16", "residual_bins": []},
        "polynomial": {"exact_k": 16, "polynomial_terms": [0, 1, 2, "sqrt"], "residual_bins": []},
        "polynomial and residuals": {
            "exact_k": 16, "polynomial_terms": [0, 1, "sqrt"], "normalize_t": True,
            "residual_bins": bins, "delta_encoding": False,
        },
    }  # fmt: skip
    for name, options in configs.items():
        config = DistributionQuantizationConfig(d=vocab_size, k=k, **options)
        compressor = LogprobCompressor(config=config)
        packed = compressor.compress_from_sparse(ids, logprobs)
        their_ids, theirs = compressor.decompress_to_sparse(packed)
        theirs = theirs.float() - theirs.double().logsumexp(-1, True).clamp(min=0).float()
        folder = work / "packed"
        folder.mkdir(exist_ok=True)
        table = {
            "input_ids": [[1] * (num_rows + 1)],
            **{n: [v.tolist()] for n, v in packed.items()},
        }
        pyarrow.parquet.write_table(pyarrow.table(table), folder / "a.parquet")
        text = yaml.safe_dump(config.model_dump(mode="json"))
        (folder / "compression_config.yaml").write_text(text)
        cache = open_cache(folder / "a.parquet")
        [(rows, _)] = read_cache(cache, cache.shards[0])
        ours = torch.from_numpy(rows.topk.logprobs).view(num_rows, k)
        same = torch.equal(torch.from_numpy(rows.topk.ids).view(num_rows, k).long(), their_ids)
        apart = float((ours - theirs).abs().max())
        figure = f"ids equal, values {apart:.0e} apart" if same else "other ids"
        yield Check(f"compressed rows, {name}", figure, holds=same and apart < 0.02)

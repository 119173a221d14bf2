"""Write axolotl's prepared columns, where row i predicts token i + 1."""

from __future__ import annotations

from typing import Any

import numpy as np

from xtok.teachers.formats.columns import StudentSide, list_array, next_tokens
from xtok.teachers.formats.documents import Documents


def table(documents: Documents, target: StudentSide) -> Any:
    """Return the columns that `DataCollatorForKD` of axolotl 0.19 reads.

    The candidates of each row are renormalized to sum to 1. Rows with fewer candidates are padded
    with an id that the student predicts with negligible probability, because the normalization of
    the student's probabilities in axolotl's loss includes the padding.
    """
    import pyarrow

    topk = documents.topk
    ids, logprobs, is_real = next_tokens(topk, target)
    # Subtract the maximum, because exp is 0 below −104.
    logprobs = logprobs - logprobs.max(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        sums = np.where(is_real, np.exp(logprobs), 0).sum(axis=1, keepdims=True)
        logprobs = np.where(is_real, logprobs - np.log(sums), np.float32(-1e9))
    mask = documents.targets
    is_target = is_real & np.append(mask[1:], False)[:, None]
    columns = {
        "input_ids": topk.token_ids,
        "attention_mask": np.ones(len(topk.token_ids), np.int8),
        "labels": np.where(mask, topk.token_ids, -100).astype(np.int32),
        "target_token_ids": ids,
        "target_logprobs": logprobs.astype(np.float32),
        "target_mask": is_target.astype(np.int8),
    }
    lists = {name: list_array(topk.bounds, values) for name, values in columns.items()}
    return pyarrow.table({**documents.columns, **lists})

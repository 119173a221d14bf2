"""KL to a teacher of the same tokenizer, position by position."""

from __future__ import annotations

from torch import Tensor

from xtok.training.losses.chunks import Chunks, require_fit
from xtok.training.losses.config import SameTokenizerConfig
from xtok.training.losses.event_kl import plan_kl, starts_of
from xtok.training.losses.logits import AnyLogits, as_logits
from xtok.training.losses.one_pass import Plan, one_pass


def same_tokenizer_kl(
    student_logits: AnyLogits,
    teacher_logits: AnyLogits,
    mask: Tensor,
    config: SameTokenizerConfig | None = None,
) -> Tensor:
    """Return the KL on k tokens, position by position, to a teacher of the same tokenizer.

    K are the k tokens with the largest maximum teacher logit in the microbatch; both sides' softmax
    at temperature τ is taken within K (Hinton et al., arXiv 1503.02531; the selection is that of
    NeMo-RL's teachers without a map):

        loss = τ² · mean over positions of Σ_{j∈K} r_j (log r_j − log s_j)

    Position t of a row is compared with position t: both sides must have the same ids and padding.
    The loss `same-tokenizer` of `make_loss` compares aligned tokens instead, so that sides may be
    padded, cut and rendered differently.

    Args:
        student_logits: `[B, T, V]`, a tensor or `HiddenLogits`; computed in float32 under any
            autocast (float64 if they are).
        teacher_logits: `[B, T, V]`, either; columns beyond the narrower side's width are ignored.
        mask: `[B, T]`, 0 where a position does not count: padding, and the last one, which
            predicts nothing.
        config: the options; the defaults if None.

    Returns:
        A scalar; 0 with a gradient of zeros where no position counts.

    Raises:
        ValueError: for shapes that do not fit, and logits of NaN or +∞.
    """
    student, teacher = as_logits(student_logits), as_logits(teacher_logits)
    if not student.shape[:-1] == teacher.shape[:-1] == mask.shape:
        raise ValueError(
            f"student's logits {list(student.shape)}, teacher's "
            f"{list(teacher.shape)} and mask {list(mask.shape)} do not fit"
        )
    config = config or SameTokenizerConfig()
    rows, places = (mask != 0).nonzero(as_tuple=True)
    at = (rows, places), (rows, places)
    return one_pass(student_logits, [plan_kl(student, teacher, at, config, top_k=config.top_k)])[0]


def plan_same_tokenizer_kl(
    student_logits: AnyLogits,
    teacher_logits: AnyLogits,
    chunks: Chunks,
    config: SameTokenizerConfig,
) -> Plan:
    """Return what `same_tokenizer_kl` compares where chunks begin, as `event_kl` does."""
    both = as_logits(student_logits), as_logits(teacher_logits)
    require_fit(chunks, both, (0, 0))
    return plan_kl(*both, starts_of(chunks), config, top_k=config.top_k)

"""KL to a teacher with the same tokenizer, position by position."""

from __future__ import annotations

from torch import Tensor

from xtok.training.losses.config import SameTokenizerConfig
from xtok.training.losses.event_kl import plan_kl
from xtok.training.losses.logits import AnyLogits, as_logits
from xtok.training.losses.one_pass import one_pass


def same_tokenizer_kl(
    student_logits: AnyLogits,
    teacher_logits: AnyLogits,
    mask: Tensor,
    config: SameTokenizerConfig | None = None,
) -> Tensor:
    """Return the KL to a teacher with the same tokenizer, position by position.

    K are the `top_k` tokens with the largest maximum teacher logit in the microbatch, as in
    NeMo-RL; both softmaxes are restricted to K (Hinton et al., arXiv 1503.02531):

        loss = τ² · mean over positions of Σ_{j∈K} r_j (log r_j − log s_j)

    Both sides, `[B, T, V]`, must have the same ids and padding; columns beyond the narrower side
    are ignored. `mask`, `[B, T]`, is 0 for padding and the last token. (`make_loss` compares
    aligned tokens instead, so padding, truncation and rendering may differ.)

    Returns:
        A scalar; 0 with zero gradients if no position counts.

    Raises:
        ValueError: if shapes do not fit, or logits are NaN or +∞.
    """
    student, teacher = as_logits(student_logits), as_logits(teacher_logits)
    if not student.shape[:-1] == teacher.shape[:-1] == mask.shape:
        raise ValueError(
            f"the student's logits {list(student.shape)}, the teacher's {list(teacher.shape)} and "
            f"the mask {list(mask.shape)} must agree in [B, T]"
        )
    [positions] = (mask.flatten() != 0).nonzero(as_tuple=True)
    plan = plan_kl(student, teacher, (positions, positions), config or SameTokenizerConfig())
    return one_pass(student_logits, [plan])[0]

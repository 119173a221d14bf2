"""File names of maps contain the options that differ from the defaults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from xtok.config import BuildConfig
from xtok.loss_names import BuildLoss
from xtok.maps.names import build_name


@pytest.mark.parametrize(
    ("loss", "options", "texts", "name"),
    [
        (None, {}, (), "top4"),
        (None, {"weights": "synthetic", "target": "both"}, (),
         "top4_weights-synthetic_target-both"),
        (None, {"exact_match": False}, (), "top4_no-exact-match"),
        (None, {"reverse_pass": False, "max_pieces": 2, "special_tokens": "off"}, (),
         "top4_max-pieces-2_no-reverse-pass_special-tokens-off"),
        (None, {"ignore_student_ids": (1, 2)}, (), "top4_ignore-student-ids-3a316d"),
        ("p-kl", {}, (), "p-kl_top8"),
        ("gold", {}, (), "gold_top8"),
        ("h-kl", {"top_k": 4, "scale_trick": True}, (), "h-kl_top4_scale-trick"),
        ("p-kl", {"exact_match": True}, (), "p-kl_top8_exact-match"),
        (None, {}, ("a/wiki.de.jsonl", "b.txt"), "top4_text-wiki.de-and-1"),
    ],
)  # fmt: skip
def test_file_names_contain_options_that_differ(
    loss: BuildLoss | None, options: dict[str, Any], texts: Sequence[str], name: str
) -> None:
    config = BuildConfig.for_loss(loss, **options) if loss else BuildConfig(**options)
    file_name = build_name("a", "b", config, loss=loss, texts=texts)
    assert file_name == f"a_to_b_{name}.safetensors"

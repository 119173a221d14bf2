"""Invalid values of arguments: an error that names the value."""

from __future__ import annotations

import pickle  # noqa: TID251  # as between processes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import xtok
from xtok import BuildConfig, SortCutConfig, XtokError, losses
from xtok.conversation.batching import collate
from xtok.errors import TokenizerError
from xtok.maps.records import InvariantError
from xtok.training.topk_collator import TopKCollator

SCORED = {"input_ids": [97, 98], "realized_logprob": [None, -1.0]}


def scored(input_ids: list[Any]) -> object:
    return xtok.DistillationCollator("bytes", "bytes")([{**SCORED, "input_ids": input_ids}])


def stored(input_ids: list[Any], best: Sequence[Any] = (7,)) -> Any:
    row = {"input_ids": input_ids, "topk_ids": [[], best], "topk_logprobs": [[], [-0.5]]}
    return TopKCollator()([row])


def bytes_map() -> xtok.ProjectionMap:
    return xtok.build("bytes", "bytes")


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: BuildConfig(prep_top_k=1), ValueError, "^prep_top_k is 1,"),
        (lambda: losses.PKLConfig(top_k=1.5), ValueError, "top_k is 1.5"),  # type: ignore[arg-type]
        (lambda: xtok.explain(bytes_map(), worst=0), ValueError, "worst is 0"),
        (lambda: xtok.inspect(bytes_map(), texts="a.txt"), ValueError, "require a second map"),
        (lambda: xtok.inspect(bytes_map(), names=["a"]), ValueError, "require a second map"),
        (lambda: bytes_map()[97.9], TypeError, "'float' object"),  # type: ignore[index]
        (lambda: xtok.vocab("bytes", "\ud800"), XtokError, "has no token"),
        (lambda: collate([{"ids": [1]}], pad_id=0, padding_side="Left"),  # type: ignore[arg-type]
         ValueError, "padding_side is 'Left'"),
        (lambda: xtok.generate(xtok.load_pair("bytes", "bytes"), "spelling", SortCutConfig()),  # type: ignore[arg-type]
         TypeError, "expected a GenerateConfig"),
        (lambda: xtok.DistillationCollator("bytes", ["bytes"] * 2)([SCORED]), ValueError,
         "one teacher, .* 2"),
        (lambda: xtok.transplant("bytes", "bytes", "new", shrink=1.5), ValueError, "shrink is 1.5"),
        (lambda: xtok.transplant("bytes", "bytes", "new", documents="a.txt"), ValueError,
         "documents is .*'a.txt'"),
        (lambda: TopKCollator()([{"input_ids": [5]}]), ValueError, "a row has no topk_ids"),
        (lambda: scored([97.5, 98]), ValueError, "^input_ids contains 97.5"),
        (lambda: scored([97, 10**20]), ValueError, f"input_ids contains {10**20}"),
        (lambda: scored(["a", 98]), ValueError, "input_ids contains a,"),
        (lambda: stored([1.5, 2]), ValueError, "input_ids contains 1.5"),
        (lambda: stored([5, 6], [7.25]), ValueError, "topk_ids contains 7.25"),
        (lambda: stored([5, 6], [True]), ValueError, "topk_ids contains True"),
        (lambda: stored([5, 6], [None]), ValueError, "topk_ids contains None"),
    ],
)  # fmt: skip
def test_an_invalid_value_is_named_in_the_error(
    call: Callable[[], object], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        call()


def test_bytes_that_python_cannot_decode_are_a_token() -> None:
    """Python represents a command-line argument that is not UTF-8 in this way."""
    assert xtok.vocab("bytes", "\udce4").tokens[0].id == 0xE4


def test_another_process_raises_the_same_error() -> None:
    """The workers of a DataLoader pickle their errors."""
    error = TokenizerError("a.model: no width", hint="give {option}", parameter="width")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (TokenizerError, "a.model: no width (give width=)")
    assert copy.hint_with("--width") == "give --width"
    broken = pickle.loads(pickle.dumps(InvariantError("ids", "row 0 is not sorted")))
    assert (broken.invariant, str(broken)) == ("ids", "row 0 is not sorted")


@pytest.mark.parametrize(
    "ids", [[5, 6], [5.0, 6.0], np.array([5, 6], np.uint32), np.array([5, 6], object)]
)
def test_whole_numbers_of_any_type_are_ids(ids: Any) -> None:
    assert stored(ids)["input_ids"].tolist() == [[5, 6]]

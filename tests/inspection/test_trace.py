"""A report about two maps reads the pair, the text and each map once."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import small_tokenizers

import xtok
from xtok.building.counting.pair_text import PairText
from xtok.building.exact import find_matches
from xtok.building.multitoken import spelled_map
from xtok.conversation.texts import find_texts
from xtok.inspection.advice import advise
from xtok.inspection.pair_facts import pair_facts
from xtok.inspection.report import examine
from xtok.maps.map_arguments import bind_maps
from xtok.tokenizers.roles import match_roles
from xtok.tokenizers.table import TokenTable, differing_ids, match_bytes

COUNTED = {
    function.__code__: function.__name__
    for function in (
        *(match_bytes, match_roles, differing_ids),
        *(find_texts, PairText.read, pair_facts, advise, find_matches, spelled_map, bind_maps),
        vars(TokenTable)["_sha256"].func,
    )
}


def test_each_fact_of_a_report_is_computed_once(small: Path, tmp_path: Path) -> None:
    models = str(small / "small-byte-level"), str(small / "small.model")
    xtok.build(*models).save(tmp_path / "a.safetensors")
    xtok.build(*models, for_loss="gold").save(tmp_path / "b.safetensors")
    (tmp_path / "a.txt").write_text(small_tokenizers.ENGLISH)
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in COUNTED:
            calls[COUNTED[frame.f_code]] += 1

    pair = xtok.load_pair(*models)
    sys.setprofile(count)
    try:
        maps = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
        examine(maps, texts=[tmp_path / "a.txt"], pair=pair)
    finally:
        sys.setprofile(None)
    assert calls == {
        "match_bytes": 2,  # one segmentation in each direction, for events
        "match_roles": 2,
        "differing_ids": 1,  # all texts in one call
        "find_texts": 1,
        "read": 1,
        "pair_facts": 1,
        "advise": 1,
        "find_matches": 1,
        "spelled_map": 1,  # the recipe, as the reference of the measures
        "bind_maps": 1,
        "_sha256": 6,  # the tables of the files and of the tokenizers, for their digests
    }

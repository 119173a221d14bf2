"""Errors of maps and their files: causes, messages and hints."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from error_causes import Errors, create, file, messages_test, read_map, spellings
from make_maps import FOREIGN, GOOD, SLOT, TINY, edited, pt_bytes, tiny_map
from safetensors.torch import save as safetensors

import xtok
from xtok import ProjectionMap, SpellingMap
from xtok.maps.events import EventMap
from xtok.maps.file import check_map_output, check_reverse, to_nemo, to_safetensors
from xtok.maps.records import InvariantError


def tables(name: str) -> str:
    """Write both tables, and return the name of one."""
    spellings().save("t.pt")
    return name


ERRORS: Errors = {
    "build the map again, or give another file": [
        (lambda: read_map(b""), "the map map.safetensors is empty"),
        (lambda: read_map(b"", "two  spaces.pt"), "the map two  spaces.pt is empty"),
        (lambda: read_map(b"not a map"), "map.safetensors is not a complete safetensors file: …"),
        (lambda: read_map(b"PK", "map.pt"), "map.pt is a damaged .pt file: …"),
        (
            lambda: read_map(safetensors({"weights": torch.zeros(3)})),
            "map.safetensors is a safetensors file, but not an xtok map; the file contains the "
            "tensors 'weights'",
        ),
        (
            lambda: read_map(pt_bytes({"step": 3, "model": {}}), "a.pt"),
            "a.pt is not a valid map: the file contains a dict with the keys 'step', 'model', "
            "expected indices and likelihoods, pair counts, or a matrix",
        ),
        (
            lambda: read_map(pt_bytes([1]), "a.pt"),
            "a.pt is not a valid map: the file contains list, expected indices and likelihoods, "
            "pair counts, or a matrix",
        ),
        (
            lambda: read_map(edited({"weights": None})),
            "map.safetensors is not a valid map: it lacks 'weights'",
        ),
        (
            lambda: read_map(
                Path(create("a.pt", TINY.save)).read_bytes().replace(b"org/s", b"org/t"),
                "map.pt",
            ),
            "map.pt is a damaged .pt file: the checksum of its member …",
        ),
        (
            lambda: read_map(edited(format_version=2)),
            "map.safetensors is not a valid map: its format version is 2, expected 1",
        ),
        (
            lambda: read_map(edited(kind="pairs")),
            "map.safetensors is not a valid map: the kind 'pairs' is not valid",
        ),
    ],
    "pass the path of a .safetensors or .pt map, for example one that xtok build made": [
        (
            lambda: ProjectionMap.load("none.pt"),
            "the map none.pt cannot be read: No such file or directory",
        ),
        (
            lambda: read_map(b'{"model_type": "llama"}', "config.json"),
            "config.json is neither a .safetensors nor a .pt file",
        ),
    ],
    "pass the path of a .safetensors or .pt map, for example one that xtok build made; xtok "
    "doctor compares the models": [
        (
            lambda: ProjectionMap.load(create("folder", os.mkdir)),
            "the map folder cannot be read: Is a directory",
        ),
    ],
    "give another path": [
        (lambda: ProjectionMap.load("nul\0.pt"), "the map nul\x00.pt has a NUL in its name"),
        (lambda: TINY.save("nul\0.pt"), "the output nul\x00.pt contains a NUL character"),
        (
            lambda: TINY.save(create("pipe.pt", os.mkfifo)),
            "the output pipe.pt is not a regular file",
        ),
    ],
    "if its weights were trained, convert the map once with normalize=": [
        (
            lambda: read_map(edited({"weights": np.full(7, 0.5, np.float32)})),
            "map.safetensors is not a valid map: the weights of row 0 sum to 0.5, expected 1",
        ),
        (
            lambda: read_map(to_safetensors(TINY).replace(TINY.teacher_ids.tobytes(), bytes(28))),
            "map.safetensors is not a valid map: the tensors changed after the file was written",
        ),
    ],
    "save only tensors, numbers and strings, or a dict of counts {(student_id, teacher_id): "
    "number}, or build the map again": [
        (
            lambda: read_map(pt_bytes({**FOREIGN, "x": print}), "map.pt"),
            "map.pt is damaged, or contains objects that could run code",
        ),
    ],
    "check that the map belongs to this pair (the map's models are org/student and org/teacher), "
    "or leave out teacher_vocab_size=": [
        (
            lambda: read_map(to_safetensors(TINY), teacher_vocab_size=5),
            "map.safetensors has width 4 on the teacher's side, expected 5",
        ),
    ],
    "pass the width of the logits with teacher_vocab_size=, at least 4": [
        (
            lambda: read_map(pt_bytes(FOREIGN), "map.pt", teacher_vocab_size=2),
            "map.pt has the teacher id 3, but the width is 2",
        ),
    ],
    "pass at most 16777216 as teacher_vocab_size=": [
        (
            lambda: read_map(pt_bytes(FOREIGN), "map.pt", teacher_vocab_size=2**30),
            "map.pt cannot have width 1073741824",
        ),
    ],
    "use the token's id instead": [
        (
            lambda: read_map(pt_bytes(FOREIGN), "map.pt")["ab"],
            "the map has no token table for a/student: xtok did not create the map",
        ),
    ],
    "write a token with its spaces, such as ' the', and bytes as '\\xe4'": [
        (lambda: TINY["abc"], "org/student has no token 'abc'"),
    ],
    "write a token with its spaces, such as ' the', and bytes as '\\xe4'; for the id 97, pass an "
    "id instead of a text": [
        (lambda: TINY["97"], "org/student has no token '97'"),
    ],
    "pass an id in the expected range, or pass the token as text": [
        (lambda: TINY[-1], "org/student has no id -1, expected 0 to 5"),
    ],
    "cut the map first with xtok sort-cut, or write .safetensors": [
        (
            lambda: to_nemo(replace(TINY, top_k=2**30)),
            "a .pt of 6 rows and 1073741824 columns would take 72 GiB",
        ),
    ],
    "shorten the names of the special tokens in the tokenizer's files": [
        (
            lambda: to_safetensors(replace(TINY, method="x" * (8 << 20))),
            "a map of org/student and org/teacher cannot be written: its metadata has "
            "8389469 bytes, expected at most 8388608",
        ),
    ],
    "name it map.safetensors, or map.txt/ for a folder": [
        (
            lambda: check_map_output("map.txt", or_folder=True),
            "the output map.txt does not end in .safetensors or .pt",
        ),
    ],
    "name it Llama-3.2.safetensors, or Llama-3.2/ for a folder": [
        (
            lambda: check_map_output("Llama-3.2", or_folder=True),
            "the output Llama-3.2 does not end in .safetensors or .pt",
        ),
    ],
    "name it folder.safetensors": [
        (lambda: TINY.save("folder/"), "the output folder/ does not end in .safetensors or .pt"),
    ],
    "name a file": [
        (lambda: check_map_output("-"), "the output - is a stream, not a file"),
    ],
    "choose another folder": [
        (
            lambda: check_map_output(f"{file('a-file')}/no/map.pt"),
            "the output cannot be written: a-file is a file, not a folder",
        ),
    ],
    "name a file in the folder": [
        (
            lambda: check_map_output(create("folder.pt", os.mkdir)),
            "the output folder.pt is a folder",
        ),
    ],
    "delete the link, or give another path": [
        (
            lambda: TINY.save(create("loop.pt", lambda name: os.symlink(name, name))),
            "the output loop.pt is a symbolic link to itself",
        ),
    ],
    "use xtok verify or xtok inspect for this file; "
    "xtok build STUDENT TEACHER --for p-kl makes a projection map": [
        (
            lambda: ProjectionMap.load(create("e.safetensors", xtok.events("bytes", "bytes").save)),
            "e.safetensors is an event map, not a projection map",
        ),
    ],
    "use xtok verify or xtok inspect for this file; "
    "xtok events STUDENT TEACHER makes an event map": [
        (
            lambda: EventMap.load(create("m.safetensors", TINY.save)),
            "m.safetensors is a projection map, not an event map",
        ),
    ],
    "use xtok verify or xtok inspect for this file; "
    "xtok events STUDENT TEACHER --for csd makes a spelling map": [
        (
            lambda: SpellingMap.load(create("m.safetensors", TINY.save)),
            "m.safetensors is a projection map, not a spelling map",
        ),
    ],
    "check that the map belongs to this pair (the map's models are bytes and bytes), or leave out "
    "teacher_vocab_size=": [
        (
            lambda: xtok.convert(
                create("s.safetensors", spellings().save), "t.pt", teacher_vocab_size=9
            ),
            "s.safetensors has width 256 on the teacher's side, expected 9",
        ),
    ],
    "leave out preserve_last=": [
        (
            lambda: xtok.convert(
                create("s.safetensors", spellings().save), "t.pt", preserve_last=False
            ),
            "s.safetensors is a spelling map, which has no weights",
        ),
    ],
    "leave out normalize=": [
        (
            lambda: xtok.convert(create("s.safetensors", spellings().save), "t.pt", normalize=True),
            "s.safetensors is a spelling map, which has no weights",
        ),
    ],
    "pass the map as .safetensors, for example from xtok events --for csd": [
        (
            lambda: SpellingMap.load(tables("t.pt")),
            "t.pt contains a table for NeMo-RL, which xtok can write but not read",
        ),
    ],
    "write hf:OWNER/NAME/FILE or hf:OWNER/NAME@REVISION/FILE": [
        (
            lambda: ProjectionMap.load("hf:owner/name"),
            "hf:owner/name does not name a file in a repo on the hub",
        ),
    ],
    "write a local file, then upload it: hf upload OWNER/NAME FILE": [
        (
            lambda: TINY.save("hf:owner/name/map.safetensors"),
            "the output hf:owner/name/map.safetensors is on the hub, but xtok only writes "
            "local files",
        ),
    ],
    "move this file, or choose an output name other than t.pt": [
        (
            lambda: ((file("t.reverse.pt", "mine"), tables("t.pt"))),
            "t.reverse.pt exists and is not a table that xtok wrote; the teacher's table "
            "would replace this file",
        ),
        (
            lambda: check_reverse(Path(tables("t.pt")), "a", "b"),
            "t.reverse.pt exists and contains the table from bytes to bytes; the teacher's "
            "table would replace this file",
        ),
    ],
}

test_map_errors = messages_test(ERRORS)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (replace(GOOD, weights=GOOD.weights[:4]), "the three arrays differ in length"),
        (replace(GOOD, row_kind=GOOD.row_kind[:3]), "row_kind does not have shape [4]"),
        (replace(GOOD, scale_slot=SLOT[:3]), "scale_slot does not have shape [4]"),
        (
            replace(GOOD, student_ids=GOOD.student_ids + 1),
            "student_ids contains values outside 0..3",
        ),
        (tiny_map({0: [(-1, 1.0)]}), "teacher_ids contains values outside 0..5"),
        (tiny_map({0: [(1, 1.0), (2, 0.0)]}), "some weights are not above 0"),
        (replace(GOOD, scale_slot=SLOT * 2), "scale_slot contains values outside 0..1"),
        (replace(GOOD, scale_slot=np.ones(4, np.uint8)), "an empty row has a scale slot"),
        (replace(GOOD, top_k=1), "a row has more entries than top_k=1"),
        (tiny_map({2: [(1, 1.0)], 0: [(1, 1.0)]}), "student_ids are not sorted"),
        (
            tiny_map({0: [(1, 0.25), (3, 0.75)]}),
            "row 0 is not sorted by descending weight, then teacher id",
        ),
        (
            tiny_map({0: [(1, 0.5), (2, 0.3), (1, 0.2)]}),
            "a row contains a teacher id twice",
        ),
        (tiny_map({0: [(1, 0.75)]}), "the weights of row 0 sum to 0.75, expected 1"),
    ],
)
def test_messages_of_broken_invariants(broken: ProjectionMap, message: str) -> None:
    """`verify` prints these messages, so they have no hint."""
    with pytest.raises(InvariantError) as error:
        broken.check()
    assert str(error.value) == message


def test_message_of_a_student_id_outside_the_map() -> None:
    with pytest.raises(IndexError) as error:
        GOOD.row(4)
    assert str(error.value) == "student id 4 is outside 0..3"

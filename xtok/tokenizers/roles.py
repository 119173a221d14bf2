"""Roles of special tokens, and special tokens of two vocabularies paired up."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from xtok.tokenizers.table import TokenTable, TokenType

# Special tokens by role, with the names that model families give them in their published
# tokenizer_config.json or code. In the order in which roles are paired up: a token that ends a
# turn and ends the text is matched as the end of a turn first; one that begins and ends texts, as
# GPT-2's, as their end, which models predict.
_NAMES_OF_ROLES: dict[str, str] = {
    "turn_start": "<|im_start|> <start_of_turn> <|start|> <|START_OF_TURN_TOKEN|>",
    "turn_end": "<|im_end|> <end_of_turn> <|end|> <|eot_id|> <|eot|> <|END_OF_TURN_TOKEN|>",
    "header_start": "<|start_header_id|> <|header_start|>",
    "header_end": "<|end_header_id|> <|header_end|> <|message|>",
    "system_start": "[SYSTEM_PROMPT] <|system|> <|SYSTEM_TOKEN|>",
    "system_end": "[/SYSTEM_PROMPT]",
    "user_start": "[INST] <｜User｜> <|user|> <|USER_TOKEN|>",
    "user_end": "[/INST]",
    "assistant_start": "<｜Assistant｜> <|assistant|> <|CHATBOT_TOKEN|>",
    "assistant_end": "",
    "tool_start": "[AVAILABLE_TOOLS]",
    "tool_end": "[/AVAILABLE_TOOLS]",
    "tool_call_start": "<tool_call> [TOOL_CALLS] <|python_tag|> <|python_start|> "
    "<｜tool▁calls▁begin｜>",
    "tool_call_end": "</tool_call> <|python_end|> <|call|> <｜tool▁calls▁end｜>",
    "tool_response_start": "<tool_response> [TOOL_RESULTS] <|observation|> "
    "<｜tool▁outputs▁begin｜>",
    "tool_response_end": "</tool_response> [/TOOL_RESULTS] <｜tool▁outputs▁end｜>",
    "think_start": "<think> [THINK] <|reasoning_thinking_start|>",
    "think_end": "</think> [/THINK] <|reasoning_thinking_end|>",
    "fim_prefix": "<|fim_prefix|> <fim_prefix> [PREFIX] <｜fim▁begin｜>",
    "fim_middle": "<|fim_middle|> <fim_middle> [MIDDLE] <｜fim▁end｜>",
    "fim_suffix": "<|fim_suffix|> <fim_suffix> [SUFFIX] <｜fim▁hole｜>",
    "fim_pad": "<|fim_pad|> <fim_pad>",
    "image": "<|image|> <|image_pad|> <image_soft_token> [IMG] <image> <｜image｜>",
    "audio": "<|audio|> <audio_soft_token> [AUDIO] <|AUDIO|>",
    "eos": "</s> <eos> <|end_of_text|> <|endoftext|> <|return|> <｜end▁of▁sentence｜> <EOS_TOKEN> "
    "<EOT>",
    "bos": "<s> <bos> <|begin_of_text|> <|startoftext|> <｜begin▁of▁sentence｜> <BOS_TOKEN> <SOS>",
    "pad": "<pad> [PAD] <PAD> <|padding|> <|pad|> <|finetune_right_pad_id|> <|finetune_right_pad|> "
    "<｜▁pad▁｜>",
    "unk": "<unk> [UNK] <UNK>",
    "mask": "<mask> [MASK] <MASK_TOKEN>",
    "sep": "[SEP]",
    "cls": "[CLS]",
    "reserved": "",
}
ROLES = tuple(_NAMES_OF_ROLES)
_ROLE_OF_NAME = {name: role for role, names in _NAMES_OF_ROLES.items() for name in names.split()}
_RESERVED = re.compile(
    r"<\|(?:\w+_)?reserved(?:_special_token)?_\d+\|>|\[control_\d+\]|<SPECIAL_\d+>|<\|extra_\d+\|>"
    r"|<｜place▁holder▁no▁\d+｜>|\[unused\d+\]"
)
# Roles whose tokens all do the same work, so that several of a student may share one of a teacher.
_SHARED_ROLES = frozenset({"bos", "eos", "pad", "unk"})


def find_roles(
    table: TokenTable, declared: Mapping[str, Iterable[int]]
) -> dict[str, tuple[int, ...]]:
    """Return role to ids: those that are declared, and by known names for roles that nobody does.

    A role has what is declared and nothing else; one that is declared without ids has none. All
    are of control tokens: a token of text has no role.

    Args:
        table: names and types of the ids.
        declared: roles by the tokenizer's library and the generation config, in their order.
    """
    names = table.control_names
    roles: dict[str, list[int]] = defaultdict(list)
    for i, name in names.items():
        roles[_ROLE_OF_NAME.get(name, "reserved" if _RESERVED.fullmatch(name) else "")].append(i)
    roles["unk"] = table.ids_of_type(TokenType.UNKNOWN).tolist()
    for role, ids in declared.items():
        roles[role] = [i for i in ids if i in names]
    return {role: tuple(roles[role]) for role in ROLES if roles[role]}


def match_roles(student: TokenTable, teacher: TokenTable) -> dict[int, int]:
    """Pair the student's CONTROL and UNKNOWN ids with teacher ids of the same role.

    Within a role, tokens of the same name pair up first, then the others in the role's order, one
    to one. The rest share the role's first teacher id if the role is bos, eos, pad or unk. If the
    teacher has no end of turn, its end of text takes that role. Control tokens without a role pair
    up by name, or with the teacher's token of the role that their name is known for.
    """
    pairs: dict[int, int] = {}
    for role in ROLES:
        pairs |= _match_role(role, student, teacher, pairs)
    if "turn_end" not in teacher.roles and "eos" in teacher.roles:
        # A family without an end of turn ends the assistant's turn with its end of text.
        for s in student.roles.get("turn_end", ()):
            pairs.setdefault(s, teacher.roles["eos"][0])
    without_role = (t for t in teacher.control_names if t not in teacher.roles_by_id)
    id_of_name = {teacher.control_names[t]: t for t in without_role}
    for s, name in student.control_names.items():
        if s not in student.roles_by_id:
            known = teacher.roles.get(_ROLE_OF_NAME.get(name, ""), ())
            t = id_of_name.get(name, next(iter(known), None))
            if t is not None and t not in pairs.values():
                pairs[s] = t
    return dict(sorted(pairs.items()))


def _match_role(
    role: str, student: TokenTable, teacher: TokenTable, earlier: Mapping[int, int]
) -> dict[int, int]:
    """Pair the ids of one role that no earlier role has paired."""
    rows, candidates = (
        # Byte-level tokenizers often declare their end of text as "unknown", and never emit it so.
        [i for i in ids if role != "unk" or table.types[i] == TokenType.UNKNOWN]
        for table, ids in ((t, t.roles.get(role, ())) for t in (student, teacher))
    )
    rows = [s for s in rows if s not in earlier]
    taken = set(earlier.values())
    id_of_name = {teacher.name(t): t for t in reversed(candidates) if t not in taken}
    pairs = {s: id_of_name[student.name(s)] for s in rows if student.name(s) in id_of_name}
    taken |= set(pairs.values())
    rest = [s for s in rows if s not in pairs]
    free = [t for t in candidates if t not in taken]
    pairs |= dict(zip(rest, free, strict=False))
    if candidates and role in _SHARED_ROLES:
        pairs |= dict.fromkeys(rest[len(free) :], candidates[0])
    return pairs


def match_names(student: TokenTable, teacher: TokenTable, *, threshold: float) -> dict[int, int]:
    """Give CONTROL ids the teacher's of the most similar name; ties go to the lower id.

    The similarity is the Dice coefficient 2·|A ∩ B| / (|A| + |B|) of the sets of neighbouring
    characters in the two names, in lower case, without brackets, bars and separators.

    Args:
        student: the vocabulary of the rows.
        teacher: the vocabulary of the columns.
        threshold: the least similarity that counts, > 0.
    """
    rows, columns = (t.ids_of_type(TokenType.CONTROL).tolist() for t in (student, teacher))
    if not columns:
        return {}
    ours, theirs = (
        [_bigrams(table.control_names[i]) for i in ids]
        for table, ids in ((student, rows), (teacher, columns))
    )
    place = {bigram: i for i, bigram in enumerate(sorted(set().union(*ours, *theirs)))}
    a, b = (
        np.array([[bigram in name for bigram in place] for name in names], np.float32).reshape(
            len(names), len(place)
        )
        for names in (ours, theirs)
    )
    sizes = a.sum(axis=1)[:, None] + b.sum(axis=1)[None, :]
    similarity = 2 * (a @ b.T) / np.maximum(sizes, 1)
    best = similarity.argmax(axis=1).tolist()
    rated = zip(rows, best, similarity.max(axis=1).tolist(), strict=True)
    return {s: columns[j] for s, j, value in rated if value >= threshold}


_SEPARATORS = re.compile(r"[<>\[\]{}|｜_▁\-\s]")


def _bigrams(name: str) -> frozenset[str]:
    bare = f"^{_SEPARATORS.sub('', name.lower())}$"
    return frozenset(bare[i : i + 2] for i in range(len(bare) - 1))


def slot_candidates(teacher: TokenTable) -> list[int]:
    """Return the teacher ids that carry no meaning, the best one for a scale slot first.

    The first UNUSED id; a padding or unknown id (not one that ends the text as well); the last
    reserved id; the last CONTROL ids, those that begin or end something last of all.
    """
    roles = teacher.roles
    ends = {i for role in ("bos", "eos", "turn_end") for i in roles.get(role, ())}
    control = teacher.ids_of_type(TokenType.CONTROL).tolist()
    candidates = [
        *teacher.ids_of_type(TokenType.UNUSED).tolist()[:2],
        *(i for role in ("pad", "unk") for i in roles.get(role, ()) if i not in ends),
        *roles.get("reserved", ())[::-1],
        *sorted(control, key=lambda i: (i in ends, -i)),
    ]
    without_bytes = teacher.lengths == 0
    return [i for i in dict.fromkeys(candidates) if without_bytes[i]]

"""Find the roles of special tokens, and match special tokens of two vocabularies."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from xtok.tokenizers.table import TokenTable, TokenType

# Names of special tokens by role, from published tokenizer_config.json files and code. Roles are
# matched in this order. turn_end precedes eos, because some tokens have both roles. eos precedes
# bos, because models predict the end of a text, and GPT-2 has one token for both.
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
# Roles that allow several student tokens to share a teacher token
_SHARED_ROLES = frozenset({"bos", "eos", "pad", "unk"})


def find_roles(
    table: TokenTable, declared: Mapping[str, Iterable[int]]
) -> dict[str, tuple[int, ...]]:
    """Return the ids of each role. The names of tokens determine roles that are not declared.

    Only control tokens have roles. A role that is declared without ids is omitted.
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

    Within a role, tokens with equal names are paired first, then the other tokens in the order of
    ids. For bos, eos, pad and unk, all remaining student tokens are paired with the first teacher
    id of the role. If the teacher has no end-of-turn token, its eos token is used. Tokens without a
    role are paired by name.
    """
    pairs: dict[int, int] = {}
    for role in ROLES:
        pairs |= _match_role(role, student, teacher, pairs)
    if "turn_end" not in teacher.roles and "eos" in teacher.roles:
        # A model without an end-of-turn token ends a turn with its eos token.
        for s in student.roles.get("turn_end", ()):
            pairs.setdefault(s, teacher.roles["eos"][0])
    without_role = (t for t in teacher.control_names if t not in teacher.roles_by_id)
    ids_by_name, used_ids = {teacher.control_names[t]: t for t in without_role}, set(pairs.values())
    for s, name in student.control_names.items():
        if s not in student.roles_by_id:
            candidates = teacher.roles.get(_ROLE_OF_NAME.get(name, ""), ())
            t = ids_by_name.get(name, next(iter(candidates), None))
            if t is not None and t not in used_ids:
                pairs[s] = t
                used_ids.add(t)
    return dict(sorted(pairs.items()))


def _match_role(
    role: str, student: TokenTable, teacher: TokenTable, earlier: Mapping[int, int]
) -> dict[int, int]:
    """Pair the ids of one role that have no partner in `earlier`."""
    candidates, used_ids = _role_ids(role, teacher), set(earlier.values())
    rest = [s for s in _role_ids(role, student) if s not in earlier]
    free = [t for t in candidates if t not in used_ids]
    id_of_name = {teacher.name(t): t for t in reversed(free)}
    pairs = {s: id_of_name[student.name(s)] for s in rest if student.name(s) in id_of_name}
    rest = [s for s in rest if s not in pairs]
    used_ids.update(pairs.values())
    free = [t for t in free if t not in used_ids]
    pairs |= dict(zip(rest, free, strict=False))
    if candidates and role in _SHARED_ROLES:
        pairs |= dict.fromkeys(rest[len(free) :], candidates[0])
    return pairs


def _role_ids(role: str, table: TokenTable) -> list[int]:
    # Byte-level tokenizers often declare the eos token as unk, but never emit unk for text.
    ids = table.roles.get(role, ())
    return [i for i in ids if role != "unk" or table.types[i] == TokenType.UNKNOWN]


def match_names(student: TokenTable, teacher: TokenTable, *, threshold: float) -> dict[int, int]:
    """Map each student CONTROL id to the teacher CONTROL id with the most similar name.

    The similarity is the Dice coefficient 2·|A ∩ B| / (|A| + |B|), where A and B are the sets of
    character pairs in the simplified names. If several names are equally similar, the lowest id is
    used. An id is omitted if its largest similarity is below `threshold`, which must be positive.
    """
    control_ids = [t.ids_of_type(TokenType.CONTROL).tolist() for t in (student, teacher)]
    if not all(control_ids):
        return {}
    student_bigrams, teacher_bigrams = (
        [_bigrams(table.control_names[i]) for i in ids]
        for table, ids in zip((student, teacher), control_ids, strict=True)
    )
    bigrams = sorted(set().union(*student_bigrams, *teacher_bigrams))
    a, b = (
        np.array([[bigram in name for bigram in bigrams] for name in names], np.float32)
        for names in (student_bigrams, teacher_bigrams)
    )
    sizes, pairs = b.sum(axis=1), dict[int, int]()
    blocks = 1 + len(a) * len(b) // 2**20  # each block has at most 4 MiB of scores
    student_ids = np.array_split(control_ids[0], blocks)
    for ids, block in zip(student_ids, np.array_split(a, blocks), strict=True):
        scores = 2 * (block @ b.T) / np.maximum(block.sum(axis=1)[:, None] + sizes, 1)
        rated = zip(ids.tolist(), scores.argmax(1).tolist(), scores.max(1).tolist(), strict=True)
        pairs |= {s: control_ids[1][j] for s, j, value in rated if value >= threshold}
    return pairs


_SEPARATORS = re.compile(r"[<>\[\]{}|｜_▁\-\s]")


def _bigrams(name: str) -> frozenset[str]:
    bare = f"^{_SEPARATORS.sub('', name.lower())}$"
    return frozenset(bare[i : i + 2] for i in range(len(bare) - 1))


def slot_candidates(teacher: TokenTable) -> list[int]:
    """Return the teacher ids without text that can be a scale slot, the best candidate first."""
    roles = teacher.roles
    ends = {i for role in ("bos", "eos", "turn_end") for i in roles.get(role, ())}
    control = teacher.ids_of_type(TokenType.CONTROL).tolist()
    candidates = [
        *teacher.ids_of_type(TokenType.UNUSED).tolist()[:2],
        *(i for role in ("pad", "unk") for i in roles.get(role, ()) if i not in ends),
        *roles.get("reserved", ())[::-1],
        *sorted(control, key=lambda i: (i in ends, -i)),
    ]
    return [i for i in dict.fromkeys(candidates) if teacher.lengths[i] == 0]

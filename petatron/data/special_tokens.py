"""Special tokens by role, and the sentinels of span corruption.

Roles have the names of Hugging Face's settings without `_token`: bos, eos, unk, sep, pad, cls and mask. A tokenizer has the roles that its
own files name, and no others. A T5 tokenizer numbers its sentinels downwards (`<extra_id_0>` has the highest id), so that the order of
use is that of the names, not of the ids.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import count, takewhile

ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_OTHER_SPELLINGS = {"bos": ("<s>",), "eos": ("</s>",)}
_SPELLINGS = {
    role: (f"<{role}>", f"[{role.upper()}]", f"<{role.upper()}>", f"<|{role}|>", *_OTHER_SPELLINGS.get(role, ()))
    for role in ROLES
}


def known_ids(ids: Mapping[str, int | None]) -> dict[str, int]:
    """Returns the ids that there are, in the order of the roles.

    >>> known_ids({"pad": 0, "eos": None, "bos": 7})
    {'bos': 7, 'pad': 0}
    """
    return {role: number for role in ROLES if (number := ids.get(role)) is not None}


def tokens_by_spelling(tokens: Collection[str]) -> dict[str, str]:
    """Returns the tokens that are spelled like a role.

    >>> tokens_by_spelling(["<s>", "[MASK]", "<|im_end|>"])
    {'bos': '<s>', 'mask': '[MASK]'}
    """
    spelled = {role: [token for token in spellings if token in tokens] for role, spellings in _SPELLINGS.items()}
    return {role: candidates[0] for role, candidates in spelled.items() if candidates}


def sentinel_name(number: int) -> str:
    return f"<extra_id_{number}>"


def find_sentinels(id_of: Callable[[str], int | None]) -> tuple[int, ...]:
    """Returns the ids of `<extra_id_0>`, `<extra_id_1>`, ... up to the first that the vocabulary lacks.

    >>> find_sentinels({"<extra_id_0>": 9, "<extra_id_1>": 8, "<extra_id_3>": 7}.get)
    (9, 8)
    """
    ids: Iterable[int | None] = (id_of(sentinel_name(number)) for number in count())
    return tuple(number for number in takewhile(lambda number: number is not None, ids) if number is not None)

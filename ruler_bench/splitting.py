"""Whether a tokenizer lets a text be counted in pieces.

A cut before a single space, with no whitespace on its left and an ordinary character after the
space, is harmless where the tokenizer itself always begins a new word there: then
`count(a + b) == count(a) + count(b)`, whatever stands further away. Common byte-level BPE
tokenizers do. This module recognises them by their parts and says no to anything it does not
know, for which the whole text is counted.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as BackendTokenizer

LOCAL_NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase"})
"""They change no text across a plain space that is followed by an ASCII character."""

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

WHITESPACE_ALTERNATIVES = frozenset({r"\s+", r"\s"})

LOCAL_ALTERNATIVES = WHITESPACE_ALTERNATIVES | frozenset(
    {
        *_CONTRACTIONS.split("|"),
        f"(?i:{_CONTRACTIONS})",
        "'(?i:[sdmt]|ll|ve|re)",
        r" ?\p{L}+",
        r" ?\p{N}+",
        r"\p{N}",
        r"\p{N}{1,3}",
        r"[0-9]",
        r"\d",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r" ?[^\s\p{L}\p{N}]+",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:{_CONTRACTIONS})?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:{_CONTRACTIONS})?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
        r"\s*[\r\n]+",
        r"\s*[\r\n]",
        r"\s+(?!\S)",
        r"\s+$",
    }
)
"""Alternatives of splitting patterns whose match never runs from a non-space into a space."""


def is_cut(left: str, right: str) -> bool:
    """Tell whether the place between two non-empty texts is one where splitting is harmless."""
    return (
        right[0] == " "
        and len(right) > 1
        and right[1].isascii()
        and right[1].isprintable()
        and right[1] != " "
        and not left[-1].isspace()
    )


def pattern_splits_at_spaces(pattern: str) -> bool:
    """Tell whether every match of a splitting pattern ends at such a cut at the latest, and
    every space is matched.
    """
    alternatives = _alternatives(pattern)
    return alternatives <= LOCAL_ALTERNATIVES and bool(alternatives & WHITESPACE_ALTERNATIVES)


def backend_splits_at_spaces(backend: BackendTokenizer) -> bool:
    """Tell whether a tokenizer of the tokenizers library lets a text be counted in pieces."""
    normalizers = _parts(backend.normalizer, "normalizers")
    splitters = _parts(backend.pre_tokenizer, "pretokenizers")
    return (
        all(part["type"] in LOCAL_NORMALIZERS for part in normalizers)
        and all(_is_local(part) for part in splitters)
        and any(_splits(part) for part in splitters)
        and all(_added_token_is_local(t) for t in backend.get_added_tokens_decoder().values())
    )


def _parts(component: Any, key: str) -> list[dict[str, Any]]:
    """Return a component as the plain steps it consists of, sequences unfolded."""
    if component is None:
        return []
    return _unfold(json.loads(component.__getstate__()), key)


def _unfold(state: dict[str, Any], key: str) -> list[dict[str, Any]]:
    if state["type"] != "Sequence":
        return [state]
    return [part for inner in state[key] for part in _unfold(inner, key)]


def _is_local(part: dict[str, Any]) -> bool:
    """Tell whether a step treats both sides of a cut alike, joined or apart."""
    match part["type"]:
        case "ByteLevel" | "Digits" | "WhitespaceSplit":
            return True
        case "Metaspace":
            return bool(part.get("split", True))
        case "Split":
            return (
                (part["behavior"], part["invert"]) in {("Isolated", False), ("Removed", True)}
                and "Regex" in part["pattern"]
                and _alternatives(part["pattern"]["Regex"]) <= LOCAL_ALTERNATIVES
            )
    return False


def _splits(part: dict[str, Any]) -> bool:
    """Tell whether a local step itself begins a new piece at every cut."""
    match part["type"]:
        case "ByteLevel":
            return bool(part.get("use_regex", True))
        case "Metaspace" | "WhitespaceSplit":
            return True
        case "Split":
            return pattern_splits_at_spaces(part["pattern"]["Regex"])
    return False


def _added_token_is_local(token: Any) -> bool:
    """Tell whether an added token can neither span a cut nor take in the space after it."""
    return not (
        token.lstrip or token.rstrip or token.single_word or re.search(r"\S\s", token.content)
    )


def _alternatives(pattern: str) -> set[str]:
    """Return the top-level alternatives of a pattern, possessive quantifiers made plain."""
    plain = re.sub(r"(?<!\\)([+*?]|\{\d+(?:,\d*)?\})\+", r"\1", pattern)
    found, start, depth, in_class, position = [], 0, 0, False, 0
    while position < len(plain):
        char = plain[position]
        if char == "\\":
            position += 1
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and depth == 0:
            found.append(plain[start:position])
            start = position + 1
        position += 1
    return {*found, plain[start:]}

"""Where a tokenizer lets a text be cut for counting.

Common byte-level BPE tokenizers first split a text into words by a pattern, and merge bytes only
within a word. At a place where a new word begins in any case, a text may be cut:
`count(a + b) == count(a) + count(b)`, whatever stands further away. Words that return then need
to be tokenised only once.

This module recognises such tokenizers by their parts, and names no place for anything it does not
know; then the whole text is counted. Three kinds of places are known, each finer than the one
before:

    before a space that stands between two other characters          is: |5437923
    before a hyphen, and between a letter and a digit                wet|-nose, 3|f
    around every digit, where digits are tokens of their own         5|4|3
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as BackendTokenizer

Cuts = re.Pattern[str]
"""Matches, with no width, every place where a text may be cut."""

# The right side is looked at first, which is faster: most places fail there.
_BEFORE_SPACE = r"(?= [!-~])(?<=\S)"
_BEFORE_HYPHEN = r"(?=-)(?<=[A-Za-z0-9])"
_LETTER_AND_DIGIT = r"(?=[0-9])(?<=[A-Za-z])|(?=[A-Za-z])(?<=[0-9])"
_AROUND_DIGIT = r"(?=[0-9])(?<=[!-~])|(?<=[0-9])(?=[!-~])"

SPACES = re.compile(_BEFORE_SPACE)
WORDS = re.compile(f"{_LETTER_AND_DIGIT}|{_BEFORE_HYPHEN}|{_BEFORE_SPACE}")
DIGITS = re.compile(f"{_AROUND_DIGIT}|{_BEFORE_HYPHEN}|{_BEFORE_SPACE}")

LOCAL_NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase"})
"""They change no text across a place whose right side is ASCII."""

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_OTHER = r"[^\r\n\p{L}\p{N}]?"

# Alternatives of splitting patterns. No match of any of them runs from a character into a space
# after it, from a letter or digit into a hyphen, or joins letters and digits.
DIGIT_ALTERNATIVES = frozenset({r"\p{N}"})
NUMBER_ALTERNATIVES = DIGIT_ALTERNATIVES | {r" ?\p{N}+", r"\p{N}{1,3}"}
LETTER_ALTERNATIVES = frozenset(
    {
        r" ?\p{L}+",
        rf"{_OTHER}\p{{L}}+",
        rf"{_OTHER}{_UPPER}*{_LOWER}+(?i:{_CONTRACTIONS})?",
        rf"{_OTHER}{_UPPER}+{_LOWER}*(?i:{_CONTRACTIONS})?",
        rf"{_OTHER}{_UPPER}*{_LOWER}+",
        rf"{_OTHER}{_UPPER}+{_LOWER}*",
    }
)
WHITESPACE_ALTERNATIVES = frozenset({r"\s+", r"\s"})
LOCAL_ALTERNATIVES = (
    NUMBER_ALTERNATIVES
    | LETTER_ALTERNATIVES
    | WHITESPACE_ALTERNATIVES
    | {
        *_CONTRACTIONS.split("|"),
        f"(?i:{_CONTRACTIONS})",
        "'(?i:[sdmt]|ll|ve|re)",
        r" ?[^\s\p{L}\p{N}]+",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s*[\r\n]",
        r"\s+(?!\S)",
        r"\s+$",
    }
)

GPT2_PATTERN = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
"""What the tokenizers library's ByteLevel splits by."""


def is_cut(cuts: Cuts, left: str, right: str) -> bool:
    """Tell whether the place between two non-empty texts is one of `cuts`."""
    return cuts.match(left[-1] + right[:2], 1) is not None


def pattern_cuts(pattern: str, special_tokens: Iterable[str]) -> Cuts | None:
    """Return where a tokenizer that splits by one pattern lets a text be cut (tiktoken)."""
    return _finest([{"type": "Pattern", "pattern": pattern}], special_tokens)


def backend_cuts(backend: BackendTokenizer) -> Cuts | None:
    """Return where a tokenizer of the tokenizers library lets a text be cut."""
    added = list(backend.get_added_tokens_decoder().values())
    if any(token.lstrip or token.rstrip or token.single_word for token in added):
        return None  # they look at their surroundings, or take in a space
    if any(part["type"] not in LOCAL_NORMALIZERS for part in _steps(backend.normalizer)):
        return None
    return _finest(_steps(backend.pre_tokenizer), [token.content for token in added])


def _finest(steps: list[dict[str, Any]], special_tokens: Iterable[str]) -> Cuts | None:
    """Return the finest places that every step allows and that lie within no special token."""
    tokens = list(special_tokens)
    if not all(_is_local(step) for step in steps):
        return None
    inserts_nothing = all(
        step["type"] in {"Digits", "Split", "Pattern"}
        or (step["type"] == "ByteLevel" and not step["add_prefix_space"])
        for step in steps
    )
    splits_words = any(_splits_words(step) for step in steps) and inserts_nothing
    splits_digits = any(_splits_digits(step) for step in steps) and inserts_nothing
    allowed = [
        (DIGITS, splits_words and splits_digits),
        (WORDS, splits_words),
        (SPACES, any(_splits_at_spaces(step) for step in steps)),
    ]
    for cuts, is_allowed in allowed:
        if is_allowed and not any(_lies_within(cuts, token) for token in tokens):
            return cuts
    return None


def _lies_within(cuts: Cuts, token: str) -> bool:
    return any(0 < place.start() < len(token) for place in cuts.finditer(f"{token}a"))


def _steps(component: Any) -> list[dict[str, Any]]:
    """Return a normalizer or pre-tokenizer as the plain steps it consists of."""
    if component is None:
        return []
    return _unfold(json.loads(component.__getstate__()))


def _unfold(state: dict[str, Any]) -> list[dict[str, Any]]:
    if state["type"] != "Sequence":
        return [state]
    inner = state.get("normalizers") or state.get("pretokenizers") or []
    return [step for one in inner for step in _unfold(one)]


def _is_local(step: dict[str, Any]) -> bool:
    """Tell whether a step treats both sides of a cut alike, joined or apart."""
    match step["type"]:
        case "ByteLevel" | "Digits" | "WhitespaceSplit":
            return True
        case "Metaspace":
            return bool(step.get("split", True))
        case "Split":
            known = (step["behavior"], step["invert"]) in {("Isolated", False), ("Removed", True)}
            return (
                known and "Regex" in step["pattern"] and _alternatives(step) <= LOCAL_ALTERNATIVES
            )
        case "Pattern":
            return _alternatives(step) <= LOCAL_ALTERNATIVES
    return False


def _splits_at_spaces(step: dict[str, Any]) -> bool:
    """Tell whether a local step begins a new piece before every space."""
    if step["type"] in {"Metaspace", "WhitespaceSplit"}:
        return True
    return bool(_alternatives(step) & WHITESPACE_ALTERNATIVES)


def _splits_words(step: dict[str, Any]) -> bool:
    """Tell whether a local step also begins one between a letter, a digit and a hyphen."""
    found = _alternatives(step)
    return bool(
        found & WHITESPACE_ALTERNATIVES
        and found & LETTER_ALTERNATIVES
        and found & NUMBER_ALTERNATIVES
    )


def _splits_digits(step: dict[str, Any]) -> bool:
    """Tell whether a local step makes every digit a piece of its own."""
    if step["type"] == "Digits":
        return bool(step["individual_digits"])
    return _alternatives(step) & NUMBER_ALTERNATIVES == DIGIT_ALTERNATIVES


def _alternatives(step: dict[str, Any]) -> set[str]:
    """Return the top-level alternatives of the pattern a step splits by, possessive quantifiers
    made plain.
    """
    match step:
        case {"type": "ByteLevel", "use_regex": True}:
            pattern = GPT2_PATTERN
        case {"type": "Split", "pattern": {"Regex": pattern}}:
            pass
        case {"type": "Pattern", "pattern": pattern}:
            pass
        case _:
            return set()
    plain = re.sub(r"(?<!\\)([+*?]|\{\d+(?:,\d*)?\})\+", r"\1", pattern)
    found, start, depth, in_class, position = set(), 0, 0, False, 0
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
            found.add(plain[start:position])
            start = position + 1
        position += 1
    return {*found, plain[start:]}

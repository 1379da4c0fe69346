"""What kind of output this is, by rules that can be read.

A kind describes an output; whether state leaked is decided by comparing arms. The codebook, the
labelled outputs that the rules were written on and their score on others are in docs/taxonomy.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import numpy as np

from ruler_bench.score import postprocess

KINDS: dict[str, str] = {
    "empty_or_punctuation": "no letter and no digit",
    "right": "the answer and nothing else",
    "right_with_extra": "the whole answer and something besides",
    "partly_right": "some of several answers",
    "other_sample_value": "the whole answer of another sample",
    "repeated_is": '"is:" over and over',
    "counting_loop": "numbers that count up or down",
    "repetition_loop": "the same piece over and over",
    "other_key_value": "the value of another key of the same prompt",
    "truncated": "one unbroken piece of the answer",
    "digits_changed": "the answer with characters dropped, doubled, swapped, replaced or inserted",
    "unknown_value": "a value or fragment of another origin",
    "no_value": "words and no value",
}
"""Kinds in the order in which their rules are asked, each with its meaning."""

REPEATS = 3
"""Copies in a row that make a loop."""

COUNTED_NUMBERS = 4
"""Consecutive numbers that make a count."""

LONGEST_PIECE = 40
"""Characters of the longest piece looked for in a loop: a UUID and what parts it from the next."""

SHORTEST_LOOP = 6
"""Characters of the shortest loop. Three equal digits in a row are no sign of one."""

SHORTEST_TRUNCATED = 3
"""A random piece of 3 characters lies in a seven-digit answer in 0.5% of the cases, of 2 in 6%."""

SHARE_IN_ORDER = 2 / 3
"""Share of the answer that a changed one still has in order: 0.3% of random values of 7 digits."""

SHARE_UNBROKEN = 1 / 2
"""Share that must be unbroken too where more is printed than the answer has, because long outputs
have much in order by chance (two thirds: 13% of 15 random digits; with this: 0.3%)."""

LOOP_CHARACTERS = 1 << 16
"""Loops are looked for at the start of an output, up to this length."""

_COMPARED_CHARACTERS = 128
_COMPARED_TOKENS = 64

_END_MARKER = re.compile(r"<\|[^<>|]{0,40}\|>|</?s>|<(?:eos|pad|end_of_turn)>")
_ALPHANUMERIC = re.compile(r"[^\W_]")
_TOKEN = re.compile(r"[^\W_]+")
_HYPHENATED = re.compile(r"[^\W_]+(?:-[^\W_]+)*")
_IS = re.compile(r"\bis ?:")
_IS_TWICE = re.compile(r"\bis ?:\s*is ?:")
_NUMBER = re.compile(r"[0-9]+")
_SHORT_NUMBER = re.compile(r"[0-9]{1,9}")
_HEX = re.compile(r"[0-9a-f]+")
_HEX_VALUE = re.compile(r"(?=[a-f-]*[0-9])[0-9a-f]+(?:-[0-9a-f]+)+")
_LONG_VALUE = re.compile(
    r"(?<![^\W_])(?:[0-9]{6,64}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})(?![^\W_])"
)
_BLANKS = re.compile(r"\s+")


@dataclass(frozen=True)
class Label:
    """The kind of an output, a key of `KINDS`, and what shows it, in words."""

    name: str
    reason: str


def classify(
    output: str,
    expected: Sequence[str | None],
    *,
    other_answers: Mapping[int, Sequence[str]] | None = None,
    context_values: Sequence[str] | None = None,
    metric: Literal["all", "part"] = "all",
) -> Label:
    """Name the kind of one output.

    Pure and deterministic; the time grows linearly with the output. Letter case, markers such as
    `<|eot_id|>` and control characters are ignored, as RULER's match rules do.

    Args:
        output: generated text.
        expected: the answers of this sample; blank ones are ignored.
        other_answers: ordinal to answers of other samples that were served. Only numbers of six
            digits or more and UUIDs are looked for: anything shorter turns up by chance.
        context_values: values of any key in this prompt; the expected ones may be among them.
        metric: "all": every answer is asked for; "part": any one of them is enough.

    Raises:
        ValueError: there is no expected answer.
    """
    if not expected:
        raise ValueError("an output needs at least one expected answer")
    text = postprocess(_END_MARKER.sub(" ", output.lower()))
    if not _ALPHANUMERIC.search(text):
        return Label("empty_or_punctuation", "no letter and no digit is left")
    answers = _distinct(expected)
    in_context = [value for value in _distinct(context_values or ()) if value not in answers]
    foreign = _foreign(text, {*answers, *in_context}, other_answers or {})
    if context_values is None and foreign:
        foreign += "; the values of this prompt were not given"
    return (
        _right(text, answers, metric, foreign)
        or (Label("other_sample_value", foreign) if foreign else None)
        or _repeated_is(text)
        or _counting_loop(text)
        or _repetition_loop(text)
        or _other_key_value(text, in_context)
        or _piece_of_answer(text, answers)
        or _rest(text, answers)
    )


def _distinct(values: Sequence[str | None]) -> list[str]:
    """Return values as they are compared, blank ones left out, each once, in their order."""
    return list(
        dict.fromkeys(kept for value in values if value and (kept := value.strip().lower()))
    )


def _right(text: str, answers: list[str], metric: str, foreign: str) -> Label | None:
    found = [answer for answer in answers if answer in text]
    if not found:
        return None
    also = f"; also {foreign}" if foreign else ""
    if metric == "all" and len(found) < len(answers):
        return Label("partly_right", f"{len(found)} of {len(answers)} answers{also}")
    besides = text
    for answer in sorted(found, key=len, reverse=True):
        besides = besides.replace(answer, " ")
    words = set(_TOKEN.findall(besides)) - ({"and"} if len(found) > 1 else set())
    if words:
        return Label("right_with_extra", f"the whole answer and more text{also}")
    return Label("right", "the answer and nothing else")


def _foreign(text: str, own: set[str], other_answers: Mapping[int, Sequence[str]]) -> str:
    """Say which other samples' answers the text holds; empty when it holds none."""
    ordinals: dict[str, list[int]] = {}
    for ordinal in sorted(other_answers):
        for value in _distinct(other_answers[ordinal]):
            if value not in own and _LONG_VALUE.fullmatch(value):
                ordinals.setdefault(value, []).append(ordinal)
    values = dict.fromkeys(match[0] for match in _LONG_VALUE.finditer(text))
    return "; ".join(
        f"holds {value}, an answer of sample {' and '.join(map(str, ordinals[value]))}"
        for value in values
        if value in ordinals
    )


def _holds(text: str, value: str) -> bool:
    """Tell whether a value stands in the text by itself, not within a longer word or number."""
    if value not in text:
        return False
    return re.search(rf"(?<![^\W_]){re.escape(value)}(?![^\W_])", text) is not None


def _repeated_is(text: str) -> Label | None:
    count = sum(1 for _ in islice(_IS.finditer(text), REPEATS))
    if count >= REPEATS:
        return Label("repeated_is", f'"is:" {REPEATS} times or more')
    return Label("repeated_is", '"is:" twice in a row') if _IS_TWICE.search(text) else None


def _counting_loop(text: str) -> Label | None:
    previous: int | None = None
    step, length, start = 0, 1, 0
    for match in _TOKEN.finditer(text):
        number = int(match[0]) if _SHORT_NUMBER.fullmatch(match[0]) else None
        if number is None or previous is None or abs(number - previous) != 1:
            step, length, start = 0, 1, number or 0
        elif number - previous == step:
            length += 1
        else:
            step, length, start = number - previous, 2, previous
        if length >= COUNTED_NUMBERS:
            return Label("counting_loop", f"counts {'up' if step > 0 else 'down'} from {start}")
        previous = number
    return None


def _repetition_loop(text: str) -> Label | None:
    body = _BLANKS.sub(" ", text).strip(" :.")[:LOOP_CHARACTERS]
    codes = np.frombuffer(body.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    for length in range(1, min(LONGEST_PIECE, len(codes) // 2) + 1):
        # Where a character equals the one `length` before it, runs of equality are loops.
        equal = codes[length:] == codes[:-length]
        if 6 * np.count_nonzero(equal) < len(codes):
            continue  # a loop is at most three times its run, and loops fill half of the text
        edges = np.flatnonzero(np.diff(equal, prepend=False, append=False))
        starts, ends = edges[::2], edges[1::2] + length
        # The last copy may lack what would part it from the next.
        ends[ends == len(codes)] += _leading_separators(body[-length:])
        loops = ends - starts >= max(REPEATS * length, SHORTEST_LOOP)
        covered = min(int((ends - starts)[loops].sum()), len(codes))
        if 2 * covered >= len(codes) and loops.any():
            first = int(starts[loops][0])
            piece = body[first : first + length]
            return Label(
                "repetition_loop", f"{piece!r} in a row; loops fill {covered} of {len(codes)}"
            )
    return None


def _leading_separators(text: str) -> int:
    letter = _ALPHANUMERIC.search(text)
    return letter.start() if letter else 0


def _other_key_value(text: str, in_context: list[str]) -> Label | None:
    held = next((value for value in in_context if _holds(text, value)), None)
    return Label("other_key_value", f"{held} is in this prompt") if held else None


def _piece_of_answer(text: str, answers: list[str]) -> Label | None:
    """Compare what is printed of values with each answer; a piece is preferred to a change."""
    pairs = [(printed, answer) for answer in answers for printed in _printed(text, answer, answers)]
    for printed, answer in pairs:
        if len(printed) >= SHORTEST_TRUNCATED and printed in _squeezed(answer):
            return Label("truncated", f"{printed} is a piece of {answer}")
    for printed, answer in pairs:
        if _is_value(answer) and (reason := _change(printed, _squeezed(answer))):
            return Label("digits_changed", f"{reason} of {answer}")
    return None


def _printed(text: str, answer: str, answers: list[str]) -> Iterator[str]:
    """Yield what the text prints of a value of the answer's kind, without what parts its pieces.

    That is all of the text where the answer is of words; where it is a value, the first pieces of
    such a value that no word parts; with several answers, the first values, as many as answers.
    """
    if not _is_value(answer):
        # A longer text can be no piece of the answer.
        tokens = islice(_TOKEN.finditer(text), len(answer) + 1)
        yield "".join(token[0] for token in tokens)[: len(answer) + 1]
    elif len(answers) > 1:
        words = (_squeezed(token[0]) for token in _HYPHENATED.finditer(text))
        yield from islice((word for word in words if _is_part(word, answer)), len(answers))
    else:
        yield _first_group(text, answer)


def _first_group(text: str, answer: str) -> str:
    group: list[str] = []
    for token in _TOKEN.finditer(text):
        if _is_part(token[0], answer):
            group.append(token[0])
        elif group:
            break
        if len(group) >= _COMPARED_TOKENS:
            break
    return "".join(group)


def _is_value(answer: str) -> bool:
    return bool(_NUMBER.fullmatch(answer) or _HEX_VALUE.fullmatch(answer))


def _is_part(token: str, answer: str) -> bool:
    """Tell whether a token may be part of a value: "be" and "added" are words before hex digits."""
    if _NUMBER.fullmatch(answer):
        return _NUMBER.fullmatch(token) is not None
    return _HEX.fullmatch(token) is not None and (
        any(character.isdigit() for character in token)
        or (len(token) >= SHORTEST_TRUNCATED and token in answer)
    )


def _squeezed(value: str) -> str:
    """Return letters and digits alone."""
    return "".join(_TOKEN.findall(value))


def _change(printed: str, answer: str) -> str:
    """Say how much of the answer is left in what is printed; empty when that may be chance."""
    head = printed[:_COMPARED_CHARACTERS]
    in_order = _longest_in_order(head, answer)
    if in_order < SHARE_IN_ORDER * len(answer):
        return ""
    if len(head) > len(answer) and _longest_unbroken(head, answer) < SHARE_UNBROKEN * len(answer):
        return ""
    return f"{in_order} of {len(answer)} characters in order"


def _longest_in_order(left: str, right: str) -> int:
    """Return the length of the longest common subsequence."""
    best = [0] * (len(right) + 1)
    for one in left:
        diagonal = 0
        for at, other in enumerate(right, 1):
            kept = best[at]
            best[at] = diagonal + 1 if one == other else max(kept, best[at - 1])
            diagonal = kept
    return best[-1]


def _longest_unbroken(left: str, right: str) -> int:
    """Return the length of the longest common substring."""
    longest = 0
    ending = [0] * (len(right) + 1)
    for one in left:
        ending = [0] + [ending[at] + 1 if one == other else 0 for at, other in enumerate(right)]
        longest = max(longest, *ending)
    return longest


def _rest(text: str, answers: list[str]) -> Label:
    if any(map(_is_value, answers)) and not any(map(str.isdigit, text)):
        return Label("no_value", "words, and no digit")
    if value := _LONG_VALUE.search(text):
        return Label("unknown_value", f"{value[0]} has the shape of a value; origin unknown")
    return Label("unknown_value", "a fragment or text of unknown origin")

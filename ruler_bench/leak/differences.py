"""Where two answers part, and how far apart two code paths are where they agree."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ruler_bench.records import Record

Level = Literal["bits", "tokens", "text"]

BITS, LOGITS, ANSWERS, CORRECTNESS = "bits", "logits", "answers", "correctness"
LEVELS = (BITS, LOGITS, ANSWERS, CORRECTNESS)
"""What a test across indices looks at: any bit; logits, by more than rounding; tokens, or text
where there are none; whether an answer is right."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How two answers to one prompt differ.

    Attributes:
        level: "bits" where the logits differ and the tokens do not; "tokens"; "text" where there
            are no tokens to compare.
        position: the first generated token whose logits differ (of those that are compared by
            tokens alone, the first that differs itself), or of text the first character.
        gap: of tokens, the sum of both top-2 margins where they part: by so much at least the
            logits of the two paths differ there. None where neither margin is known.
        token_position: of tokens, the first that differs itself: `position`, or after it.
    """

    level: Level
    position: int
    gap: float | None = None
    token_position: int | None = None

    @property
    def is_visible(self) -> bool:
        """Whether a reader of the outputs sees it."""
        return self.level != BITS

    @property
    def what(self) -> str:
        """What differs, in a reader's word."""
        return "logits" if self.level == BITS else self.level

    @property
    def where(self) -> str:
        """What differs, and from where on: logits may do so before the first token does."""
        unit = "character" if self.level == "text" else "token"
        if self.token_position in (None, self.position):
            return f"{self.what} from {unit} {self.position}"
        return f"logits from token {self.position}, in tokens from token {self.token_position}"


def difference(a: Record, b: Record, bit_by_bit: bool) -> Difference | None:
    """Return how two answers differ, or None where they do not.

    Args:
        a: a finished record.
        b: another of the same prompt.
        bit_by_bit: whether equal logits are promised.
    """
    if a.output_tokens is None or b.output_tokens is None:
        return _text_difference(a.output or "", b.output or "")
    tokens = first_difference(a.output_tokens, b.output_tokens)
    bits = None
    if bit_by_bit and a.logits_digest is not None and b.logits_digest is not None:
        bits = first_difference(a.logits_digest, b.logits_digest)
    if tokens is None:
        return None if bits is None else Difference("bits", bits)
    first = tokens if bits is None else min(tokens, bits)
    return Difference("tokens", first, _gap(a, b, tokens), tokens)


def has_bits(a: Record, b: Record) -> bool:
    """Whether both answers come with digests of their logits."""
    return a.logits_digest is not None and b.logits_digest is not None


def first_difference(a: Sequence[object], b: Sequence[object]) -> int | None:
    """Return the first place at which two sequences differ, or one ends; None where none is."""
    shorter = min(len(a), len(b))
    for place in range(shorter):
        if a[place] != b[place]:
            return place
    return None if len(a) == len(b) else shorter


def _text_difference(a: str, b: str) -> Difference | None:
    # What cuts an output at a stop word may or may not leave the blank before it.
    found = first_difference(a.strip(), b.strip())
    return None if found is None else Difference("text", found)


def _gap(a: Record, b: Record, position: int) -> float | None:
    known = [
        one.top2_margin[position]
        for one in (a, b)
        if one.top2_margin is not None and position < len(one.top2_margin)
    ]
    return sum(known) if known else None


# --- the numeric floor --------------------------------------------------------------------------

FLOOR_FACTOR = 4.0
LEAST_TOKENS_MEASURED = 20
LEAST_SAMPLES_MEASURED = 4

BOUNDS = {
    "float32": (0.02, 0.1),
    "float16": (0.03, 0.5),
    "bfloat16": (0.125, 1.0),
}
"""Least and largest floor that rounding in a dtype can account for, in logits. Between 16 and 32,
where logits often lie, neighbouring bfloat16 numbers are 0.125 apart."""


@dataclass(frozen=True, slots=True)
class NumericFloor:
    """By how much the logits of two correct code paths may differ.

    Attributes:
        value: the floor, in logits.
        typical: median over samples of the largest difference of top-2 margins within the part of
            the answer on which both paths agree; None where there was too little to measure.
        tokens, samples: how much it was measured on.
        low, high: what rounding can account for in this dtype; the floor is kept within.
    """

    value: float
    typical: float | None
    tokens: int
    samples: int
    low: float
    high: float

    @property
    def is_beyond_rounding(self) -> bool:
        """Whether the paths differ by more than rounding even where they agree."""
        return self.typical is not None and self.typical > self.high

    def sentence(self) -> str:
        """Return how it was found."""
        if self.typical is None:
            return (
                f"Numeric floor: {self.value:g} logits, what rounding in this dtype can account "
                f"for; too little was recorded to measure it ({self.tokens} tokens)."
            )
        more = (
            f" That is more than rounding accounts for, so the floor is held at {self.high:g}."
            if self.typical * FLOOR_FACTOR > self.high
            else ""
        )
        return (
            f"Numeric floor: {self.value:.3g} logits. Where the two paths agree, their top-2 "
            f"margins differ by {self.typical:.2g} in the median of {self.samples} samples "
            f"({self.tokens} tokens).{more}"
        )


def numeric_floor(
    pairs: Iterable[tuple[Record, Record]], dtypes: Iterable[str | None]
) -> NumericFloor:
    """Measure by how much two code paths differ where they agree.

    At a token where both choose the same, the difference of the two top-2 margins is a difference
    of logits between the paths: exactly that of the two leading tokens where the runner-up is the
    same, and otherwise no more than the largest between any two. Where they choose differently, the
    paths' logits differ by the sum of both margins at least. So the two are held against each
    other. The median over samples is used, so that a fault in fewer than half of them does not
    raise the floor it is measured by; four times that, since a sample's own largest difference
    varies; and no more than rounding accounts for, so that a fault in all of them does not either.

    Args:
        pairs: two paths' answers to the same prompt.
        dtypes: of the paths; the coarser one bounds the floor.
    """
    largest: list[float] = []
    tokens = 0
    for a, b in pairs:
        found = _margin_differences(a, b)
        tokens += len(found)
        if found:
            largest.append(max(found))
    low, high = dtype_bounds(dtypes)
    if tokens < LEAST_TOKENS_MEASURED or len(largest) < LEAST_SAMPLES_MEASURED:
        return NumericFloor(high, None, tokens, len(largest), low, high)
    typical = statistics.median(largest)
    value = min(high, max(low, FLOOR_FACTOR * typical))
    return NumericFloor(value, typical, tokens, len(largest), low, high)


def dtype_bounds(dtypes: Iterable[str | None]) -> tuple[float, float]:
    """Return the least and the largest floor for two paths, by the coarser of their dtypes; one
    that is not known counts as bfloat16.
    """
    known = [BOUNDS.get(dtype or "", BOUNDS["bfloat16"]) for dtype in dtypes]
    return max(known, default=BOUNDS["bfloat16"])


def _margin_differences(a: Record, b: Record) -> list[float]:
    if a.output_tokens is None or b.output_tokens is None:
        return []
    if a.top2_margin is None or b.top2_margin is None:
        return []
    agreed = first_difference(a.output_tokens, b.output_tokens)
    return [
        abs(one - other)
        for one, other in zip(a.top2_margin[:agreed], b.top2_margin[:agreed], strict=False)
    ]


def largest_shift(a: Record, b: Record) -> float:
    """Return the largest difference of the top-2 margins where both answers agree; infinite where
    there are none.
    """
    return max(_margin_differences(a, b), default=math.inf)

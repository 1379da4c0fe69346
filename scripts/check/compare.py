"""Compares answers bit by bit, and says where two of them part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from ruler_bench.records import Record
from ruler_bench.report.tables import markdown_table
from ruler_bench.report.text import human_number, markdown_cell
from scripts.check.engines import SOURCE_KEY
from scripts.check.ledger import Ledger

BIT_SETTINGS = (
    "chunk_tokens",
    "attend_tokens",
    "attention",
    "dtype",
    "ops",
    "threads",
    "device",
    SOURCE_KEY,
)
"""Settings in force that two engines must share to have the same bits, and their own source."""
LISTED = 200


@dataclass(frozen=True)
class Difference:
    """Two answers to one request that are not the same.

    Attributes:
        arm, reference: the streams.
        task, ordinal, prompt_tokens: the request.
        position: first generated token at which digests or tokens differ; None where one of the
            two answered nothing that can be compared.
        token_position: first generated token that differs; None where all are the same.
        token_ids: the two tokens there; None beyond the end of an answer.
        margins: top-2 margin of the two at token_position, else at position.
        reason: what went wrong, where nothing can be compared.
    """

    arm: str
    reference: str
    task: str
    ordinal: int
    prompt_tokens: int
    position: int | None = None
    token_position: int | None = None
    token_ids: tuple[int | None, int | None] = (None, None)
    margins: tuple[float | None, float | None] = (None, None)
    reason: str = ""


@dataclass(frozen=True)
class Comparison:
    """One stream compared with another, request by request.

    Attributes:
        requests: how many were compared.
        digests: how many digests were the same, up to the first that was not in each answer.
        missing: how many could not be compared because an answer is not there.
        differences: the answers that are not the same.
        settings: where the settings in force differ that decide the bits.
    """

    arm: str
    reference: str
    requests: int
    digests: int
    missing: int
    differences: tuple[Difference, ...]
    settings: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether every request was compared and found the same, under the same settings."""
        return self.requests > 0 and not (self.missing or self.differences or self.settings)


def compare_arms(
    ledger: Ledger, arm: str, reference: str, expected: int, *, tokens_only: bool = False
) -> Comparison:
    """Compare each answer of a stream with the one to the same request in another.

    Args:
        ledger: that holds both.
        arm: whose answers are compared, all of them.
        reference: what with.
        expected: how many there must be.
        tokens_only: digests may differ, and so may settings; only tokens count.
    """
    wanted = {(one.task, one.ordinal): one for one in ledger.records(reference)}
    differences, compared, digests = [], 0, 0
    for got in ledger.records(arm):
        other = wanted.get((got.task, got.ordinal))
        if other is None:
            continue
        compared += 1
        same, difference = _compare(got, other, tokens_only)
        digests += same
        if difference is not None:
            differences.append(difference)
    settings = () if tokens_only else _settings(ledger.in_force(arm), ledger.in_force(reference))
    return Comparison(
        arm, reference, compared, digests, expected - compared, tuple(differences), settings
    )


def _settings(got: dict[str, Any], wanted: dict[str, Any]) -> tuple[str, ...]:
    return tuple(
        f"{key}: {got.get(key)} and {wanted.get(key)}"
        for key in BIT_SETTINGS
        if got.get(key) != wanted.get(key)
    )


def _compare(got: Record, wanted: Record, tokens_only: bool) -> tuple[int, Difference | None]:
    """Return how many digests are the same up to the first that is not, and the difference."""
    place: dict[str, Any] = {
        "arm": got.arm,
        "reference": wanted.arm,
        "task": got.task,
        "ordinal": got.ordinal,
        "prompt_tokens": got.prompt_tokens,
    }
    reason = _cannot_compare(got) or _cannot_compare(wanted)
    if got.prompt_sha256 != wanted.prompt_sha256:
        reason = "the prompts are not the same"
    if reason:
        return 0, Difference(**place, reason=reason)
    ids = got.output_tokens or (), wanted.output_tokens or ()
    digests = got.logits_digest or (), wanted.logits_digest or ()
    margins = got.top2_margin or (), wanted.top2_margin or ()
    token_position = _first_difference(*ids)
    digest_position = _first_difference(*digests)
    found = [one for one in (token_position, digest_position) if one is not None]
    same = min(found, default=len(digests[0]))
    if token_position is None and (tokens_only or digest_position is None):
        return same, None
    shown = same if token_position is None else token_position
    return same, Difference(
        **place,
        position=same,
        token_position=token_position,
        token_ids=(_at(ids[0], token_position), _at(ids[1], token_position)),
        margins=(_at(margins[0], shown), _at(margins[1], shown)),
    )


def _cannot_compare(record: Record) -> str:
    """Return why an answer proves nothing, or nothing where it does."""
    if record.error is not None:
        return f"{record.arm}: {record.error}"
    if not record.output_tokens:
        return f"{record.arm}: no tokens"
    if len(record.logits_digest or ()) != len(record.output_tokens):
        return f"{record.arm}: {len(record.output_tokens)} tokens without a digest each"
    return ""


def _first_difference(got: Sequence[Any], wanted: Sequence[Any]) -> int | None:
    pairs = enumerate(zip_longest(got, wanted))
    return next((at for at, (one, other) in pairs if one != other), None)


def _at(values: Sequence[Any], position: int | None) -> Any:
    return None if position is None or position >= len(values) else values[position]


# --- tables -------------------------------------------------------------------------------------


def comparison_table(comparisons: Iterable[Comparison]) -> str:
    """Return what was compared, one line a pair of streams, in Markdown."""
    titles = ("compared", "with", "requests", "digests the same", "missing", "different", "same")
    return markdown_table(
        titles,
        [
            (
                one.arm,
                one.reference,
                str(one.requests),
                str(one.digests),
                str(one.missing),
                str(len(one.differences)),
                "yes" if one.passed else "**NO**",
            )
            for one in comparisons
        ],
    )


def difference_table(differences: Sequence[Difference]) -> str:
    """Return where answers part, one line each, in Markdown."""
    titles = ("answer of", "against", "task", "ordinal", "prompt tokens",
              "first digest that differs", "first token that differs", "tokens", "top-2 margins",
              "what")  # fmt: skip
    table = markdown_table(titles, [_cells(one) for one in differences[:LISTED]])
    more = len(differences) - LISTED
    return f"{table}\n\nand {more} more." if more > 0 else table


def _cells(one: Difference) -> tuple[str, ...]:
    return (
        one.arm,
        one.reference,
        one.task,
        str(one.ordinal),
        str(one.prompt_tokens),
        _shown(one.position),
        _shown(one.token_position),
        " / ".join(map(_shown, one.token_ids)) if one.token_position is not None else "the same",
        " / ".join(human_number(margin, 6) for margin in one.margins),
        markdown_cell(one.reason) or "-",
    )


def _shown(value: int | None) -> str:
    return "-" if value is None else str(value)


def settings_lines(comparisons: Iterable[Comparison]) -> list[str]:
    """Return a line for each pair of streams whose settings in force differ."""
    return [
        f"{one.arm} and {one.reference} differ in settings that decide bits: "
        f"{'; '.join(one.settings)}."
        for one in comparisons
        if one.settings
    ]

"""Which samples deserve a fresh engine, and which difference is worth stopping for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from ruler_bench.leak.join import ArmFacts, bits_differ_by
from ruler_bench.records import Record
from ruler_bench.streams import drawn


def bits_promised(one: ArmFacts | None, other: ArmFacts | None) -> bool:
    """Tell whether two arms' answers to a prompt must agree to the last bit."""
    return one is not None and other is not None and bits_differ_by(one, other) is None


def differ(one: Record, other: Record, bits: bool) -> bool:
    """Tell whether two answers to one prompt differ: in tokens, else in text; in bits if asked.

    An error differs from an answer, and not from another error.
    """
    if one.error is not None or other.error is not None:
        return (one.error is None) != (other.error is None)
    if one.output_tokens is not None and other.output_tokens is not None:
        if one.output_tokens != other.output_tokens:
            return True
    elif one.output != other.output:
        return True
    both = one.logits_digest is not None and other.logits_digest is not None
    return bits and both and one.logits_digest != other.logits_digest


def comparable(one: Record, other: Record) -> bool:
    """Tell whether two records answer the same request: the same prompt and the same limit."""
    return (one.ordinal, one.prompt_sha256, one.length) == (
        other.ordinal,
        other.prompt_sha256,
        other.length,
    ) and (one.score is None) == (other.score is None)


def suspicious(record: Record, others: Iterable[Record], arms: Mapping[str, ArmFacts]) -> bool:
    """Tell whether a record contradicts another: it answers the same request in other tokens, or
    other bits, although the settings promise that it does not.

    Args:
        record: the newest.
        others: records of any arm, its own included.
        arms: the arms of the run so far, by name.
    """
    return any(
        bits_promised(arms.get(record.arm), arms.get(one.arm))
        and record.error is None
        and one.error is None
        and comparable(record, one)
        and differ(record, one, bits=True)
        for one in others
        if (one.arm, one.step) != (record.arm, record.step)
    )


def suspects(
    records: Sequence[Record], ordinals: Collection[int], arms: Mapping[str, ArmFacts]
) -> list[int]:
    """Return the ordinals that are wrong, failed, or differ between two records, ascending."""
    by_ordinal: dict[int, list[Record]] = {}
    for record in records:
        by_ordinal.setdefault(record.ordinal, []).append(record)
    return sorted(one for one in ordinals if _is_suspect(by_ordinal.get(one, []), arms))


def _is_suspect(records: Sequence[Record], arms: Mapping[str, ArmFacts]) -> bool:
    if any(one.error is not None or one.correct is False for one in records):
        return True
    return any(
        comparable(one, other)
        and differ(one, other, bits_promised(arms.get(one.arm), arms.get(other.arm)))
        for place, one in enumerate(records)
        for other in records[:place]
    )


def audited(ordinals: Collection[int], seed: int, count: int) -> list[int]:
    """Return `count` ordinals drawn by the seed from all that were asked for, ascending.

    They are drawn without regard to what was found, so that a bound may count them.
    """
    return sorted(drawn(ordinals, seed, "audit")[:count])

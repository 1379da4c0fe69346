"""A regression gate: which cells fell below a baseline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ruler_bench.errors import UsageError
from ruler_bench.report.difference import Difference, difference
from ruler_bench.report.digest import Digest
from ruler_bench.report.gather import data_of, model_of
from ruler_bench.report.joined import scores_of
from ruler_bench.report.page import Section
from ruler_bench.report.text import visible

LISTED = 100


@dataclass(frozen=True)
class Gate:
    """A comparison with a baseline.

    Attributes:
        compared: name of each cell, and how it differs from the baseline.
        fallen: those of them that fell by more than is allowed.
        notes: what was not compared, and why.
    """

    compared: Sequence[tuple[str, Difference]]
    fallen: Sequence[tuple[str, Difference]]
    notes: Sequence[str]


def against_baseline(
    digests: Sequence[Digest], baseline: Sequence[Digest], fail_under: float
) -> Gate:
    """Compare each cell with the baseline's of the same task, length, backend, model and arm.

    Of several, those are taken whose settings are the same. A cell fell where its score is lower by
    more than is allowed, whether or not chance might explain it; that is told beside it.

    Args:
        digests: the runs.
        baseline: what they are held against.
        fail_under: least difference that passes, in points: -2 allows to fall by two.

    Raises:
        UsageError: no cell is in both, or a cell has several in the baseline.
    """
    known: dict[tuple[str, ...], list[Digest]] = {}
    for one in baseline:
        known.setdefault(_key(one), []).append(one)
    compared, notes, met = [], [], set()
    for one in digests:
        key = _key(one)
        met.add(key)
        if key not in known:
            notes.append(f"{_name(one)}: the baseline has no such cell.")
            continue
        other = _the_same(one, known[key])
        if data_of(one) != data_of(other) or model_of(one) != model_of(other):
            what = "samples" if data_of(one) != data_of(other) else "weights"
            notes.append(f"{_name(one)}: other {what} than the baseline's; not compared.")
            continue
        found = difference(scores_of(one), scores_of(other))
        if found is None:
            notes.append(f"{_name(one)}: no finished answer in both; not compared.")
        else:
            compared.append((_name(one), found))
    notes += [
        f"{_name(known[key][0])}: only in the baseline; not compared."
        for key in known
        if key not in met
    ]
    if not compared:
        raise UsageError(
            f"no cell can be compared with the baseline ({notes[0]}) Name a baseline with the same "
            "tasks, lengths, backends, models, arms and samples."
        )
    fallen = [one for one in compared if one[1].points < fail_under]
    return Gate(compared, sorted(fallen, key=lambda one: one[1].points), notes)


def _key(one: Digest) -> tuple[str, ...]:
    row = one.row
    return row.task, str(row.length_tokens), row.backend, row.model, one.arm


def _name(one: Digest) -> str:
    return visible(" ".join((*_key(one), one.row.settings))).strip()


def _the_same(one: Digest, candidates: Sequence[Digest]) -> Digest:
    """Return the baseline's cell with these settings; of one alone, settings may have changed."""
    if len(candidates) == 1:
        return candidates[0]
    config = one.manifest.get("config")
    same = [other for other in candidates if other.manifest.get("config") == config]
    if len(same) == 1:
        return same[0]
    folders = ", ".join(visible(other.folder) for other in candidates[:3])
    raise UsageError(
        f"--baseline: {_name(one)} is there {len(candidates)} times ({folders}), "
        f"{len(same)} of them with the same settings; name one of them."
    )


def gate_section(gate: Gate, fail_under: float) -> Section:
    """Return the table of what fell."""
    text = (
        f"{len(gate.compared)} cells compared, {len(gate.fallen)} fell by more than "
        f"{-fail_under:g} points."
    )
    return Section(
        "Against the baseline",
        text,
        ["cell", "difference", "over"],
        list(_rows(gate.fallen[:LISTED])),
    )


def _rows(found: Iterable[tuple[str, Difference]]) -> Iterable[list[str]]:
    for name, one in found:
        pairs = f"{one.samples} {'pairs' if one.is_paired else 'samples, not paired'}"
        chance = "" if one.is_clear else "; chance could explain it"
        yield [name, one.text(), pairs + chance]

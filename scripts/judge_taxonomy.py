"""Measure how well the taxonomy names wrong outputs that its rules were not written on.

    python scripts/judge_taxonomy.py draw results/reference/detector.jsonl labels.csv
    python scripts/judge_taxonomy.py score results/reference/detector.jsonl labels.csv

draw: writes the wrong outputs of the seeded faults, each different one once, in random order and
    without the kind that the rules gave, for somebody to fill in the column `kind` by the codebook
    in docs/taxonomy.md.
score: holds the kinds that were filled in against those of the rules, and prints a table.

Exit status: 0 done, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `ruler_bench`, wherever this is run from

from ruler_bench.errors import UsageError, one_line, unknown_name  # noqa: E402
from ruler_bench.leak.taxonomy import KINDS  # noqa: E402
from ruler_bench.leak.tests_of_difference import excluded_rate  # noqa: E402

DONE, WRONG = 0, 2
SEED = 42
COLUMNS = ("fault", "ordinal", "expected", "output", "is_another_answer", "kind")
Output = Mapping[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("draw", "score"))
    parser.add_argument("outputs", type=Path, help="detector.jsonl of scripts/measure_detector.py")
    parser.add_argument("labels", type=Path, help="the file to write, or to read")
    options = parser.parse_args(arguments)
    try:
        outputs = list(wrong_outputs(options.outputs))
        if options.command == "draw":
            draw(outputs, options.labels)
        else:
            print("\n".join(score(outputs, options.labels)))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG
    return DONE


def wrong_outputs(path: Path) -> Iterator[Output]:
    """Yield the wrong outputs in a proof of the detector, each different one of a sample once.

    Raises:
        UsageError: the file cannot be read, or is none.
    """
    seen: set[tuple[int, str]] = set()
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        faults = [row for row in rows if row["kind"] == "faults" and row["figures"]]
        found = [
            {**one, "fault": row["name"]}
            for row in faults
            for one in row["figures"]["wrong_outputs"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path}: holds no wrong outputs ({one_line(error)}); name the detector.jsonl that "
            "scripts/measure_detector.py wrote."
        ) from error
    answers = {(one["ordinal"], value) for one in found for value in one["expected"]}
    for one in found:
        key = (one["ordinal"], one["output"])
        if key not in seen:
            seen.add(key)
            others = [value for ordinal, value in answers if ordinal != one["ordinal"]]
            yield {**one, "is_another_answer": any(value in one["output"] for value in others)}


def draw(outputs: Sequence[Output], path: Path) -> None:
    """Write what a reader is to label.

    Raises:
        UsageError: the file is there already, or cannot be written.
    """
    rows = [
        {
            "fault": one["fault"],
            "ordinal": one["ordinal"],
            "expected": "|".join(one["expected"]),
            "output": json.dumps(one["output"]),
            "is_another_answer": one["is_another_answer"],
            "kind": "",
        }
        for one in outputs
    ]
    random.Random(SEED).shuffle(rows)
    try:
        with path.open("x", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be written ({error.strerror}); labels are never overwritten."
        ) from error


def read_labels(path: Path) -> list[dict[str, str]]:
    """Return what a reader filled in.

    Raises:
        UsageError: the file cannot be read, or holds a kind that there is not.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}).") from error
    for place, row in enumerate(rows, start=2):
        if set(row) != set(COLUMNS):
            raise UsageError(f"{path}: has other columns than {', '.join(COLUMNS)}.")
        if row["kind"] not in KINDS:
            raise unknown_name(f"{path} line {place}: kind", row["kind"], list(KINDS))
    return rows


def score(outputs: Sequence[Output], path: Path) -> Iterator[str]:
    """Yield a table of kinds by reader and by rules, and the error rate that is left.

    Raises:
        UsageError: the labels are of other outputs.
    """
    rules = {(one["fault"], str(one["ordinal"]), json.dumps(one["output"])): one for one in outputs}
    counted: Counter[tuple[str, str]] = Counter()
    for row in read_labels(path):
        one = rules.get((row["fault"], row["ordinal"], row["output"]))
        if one is None:
            raise UsageError(
                f"{path}: fault {row['fault']} ordinal {row['ordinal']}: there is no such output; "
                "draw the outputs of this proof and label them."
            )
        counted[row["kind"], one["kind"]] += 1
    total = sum(counted.values())
    right = sum(count for (reader, rule), count in counted.items() if reader == rule)
    bound = excluded_rate(total - right, total)
    share = f"{right / total:.1%}"
    yield f"{right} of {total} outputs have the kind that the reader gave them ({share});"
    yield f"at 95% that excludes an error rate above {bound:.1%} for outputs like these."
    yield ""
    yield "| label | by the rules | outputs |"
    yield "|---|---|---|"
    for reader, rule in sorted(counted, key=lambda pair: [list(KINDS).index(one) for one in pair]):
        yield f"| `{reader}` | `{rule}` | {counted[reader, rule]} |"


if __name__ == "__main__":
    sys.exit(main())

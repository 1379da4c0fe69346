"""RULER's rules: what of an output counts, and how many points it is worth.

`python -m ruler_bench.score FILES` scores prediction files (`ruler_bench.score_files`).

Source: https://github.com/NVIDIA/RULER/blob/c3f5e3b/scripts/eval/evaluate.py (post-processing,
nulls) and https://github.com/NVIDIA/RULER/blob/c3f5e3b/scripts/eval/synthetic/constants.py (match
rules). Texts are compared without regard to case, and a reference counts wherever it occurs, also
inside a longer word or number.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence

from ruler_bench.errors import unknown_name

FULL_SCORE = 100.0

_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f]")


def postprocess(output: str) -> str:
    """Return what is judged: control characters become newlines, blank ends are cut."""
    return _CONTROL_CHARACTER.sub("\n", output.strip()).strip()


def is_null(output: str) -> bool:
    """Tell whether nothing is left to judge."""
    return not postprocess(output)


def score(metric: str, output: str, expected: Sequence[str | None]) -> float:
    """Return the points of one output, 0 to 100, not rounded.

    Args:
        metric: "all": the share of references found; "part": whether any is found.
        output: generated text, before post-processing.
        expected: the references. One without a reference (None) scores 0.

    Raises:
        UsageError: the metric is unknown.
        ValueError: there is no reference, or the references are one text and no list.
    """
    return _share(metric, output, expected) * FULL_SCORE


def cell_score(
    metric: str, outputs: Sequence[str], expected: Sequence[Sequence[str | None]]
) -> float:
    """Return the score of a task's outputs as RULER reports it: the mean, with two decimals.

    It is worked out from the outputs and in the reference's order of arithmetic, because the mean
    of `score` may differ in the last bit and then round to another hundredth. Where the first
    output has no reference (None), the reference takes it that none has: 0.

    Raises:
        UsageError: the metric is unknown.
        ValueError: there is no output, one has no reference, or a text stands for a list.
    """
    if not outputs:
        raise ValueError("no outputs to score")
    if isinstance(outputs, str):
        raise ValueError("outputs must be a list; a text would be scored letter by letter")
    shares = [_share(metric, *one) for one in zip(outputs, expected, strict=True)]
    return 0.0 if expected[0][0] is None else round(sum(shares) / len(shares) * FULL_SCORE, 2)


def _share(metric: str, output: str, expected: Sequence[str | None]) -> float:
    if metric not in METRICS:
        raise unknown_name("metric", metric, METRICS)
    if not expected:
        raise ValueError("an output needs at least one reference")
    if isinstance(expected, str):
        raise ValueError("references must be a list; a text would be looked for letter by letter")
    text = postprocess(output).lower()
    return METRICS[metric](
        [float(reference is not None and reference.lower() in text) for reference in expected]
    )


def _match_all(found: Sequence[float]) -> float:
    return sum(found) / len(found)


def _match_part(found: Sequence[float]) -> float:
    return max(found)


METRICS: dict[str, Callable[[Sequence[float]], float]] = {"all": _match_all, "part": _match_part}
"""Match rules by name; each takes 1.0 or 0.0 a reference and returns the share earned."""


if __name__ == "__main__":
    from ruler_bench.score_files import main  # (imports this module under its own name)

    sys.exit(main())

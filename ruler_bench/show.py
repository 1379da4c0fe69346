"""`python -m ruler_bench.show RUN 17`: everything about one index of a run.

The question, where the needle stands, each arm's output with the characters marked that differ,
what was asked before, times, and the command that asks just this sample again in each arm. No
engine is started.

Exit status: 0 shown, 2 wrong usage.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from ruler_bench.command_line import Parser, status_of
from ruler_bench.errors import UsageError
from ruler_bench.leak.arms import REFERENCES, in_running_order
from ruler_bench.leak.rebuild import RunFolder, read_run
from ruler_bench.records import Record
from ruler_bench.report.digest import state_of
from ruler_bench.report.prompts import prompts_of
from ruler_bench.report.text import human_bytes, human_number, human_seconds, visible
from ruler_bench.values import as_indices

SHOWN_OUTPUT, SHOWN_TAIL, SHOWN_AROUND, SHOWN_PLACES = 400, 400, 60, 8
CONTROLS = ("fresh", "fresh_again", "reference")
"""Arms whose answer is what others are held against, if it is right; the first of them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    return status_of(lambda: print_lines(*parse(words)))


def print_lines(path: Path, ordinal: int) -> int:
    """Print what is known of one index, and return 0.

    Raises:
        UsageError: there is no such run, or no such index in it.
    """
    print("\n".join(show(read_run(path), ordinal)))
    return 0


def parse(arguments: Sequence[str]) -> tuple[Path, int]:
    """Return the run's folder and the ordinal.

    Raises:
        UsageError: the command line is wrong.
    """
    parser = Parser("show", __doc__, "RUN INDEX")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("index", metavar="INDEX", help="ordinal of the sample, from 0")
    read = parser.parse_args(arguments)
    if not read.index.isdecimal():
        raise UsageError(f"{read.index}: is no index; name a number from 0, such as 17.")
    return read.run, int(read.index)


def show(run: RunFolder, ordinal: int) -> Iterator[str]:
    """Yield lines about one index.

    Raises:
        UsageError: the run has no such index; names those nearby.
    """
    records = [one for one in run.records if one.ordinal == ordinal]
    if not records:
        known = sorted({one.ordinal for one in run.records})
        close = min(known, key=lambda one: abs(one - ordinal))
        raise UsageError(
            f"{run.path}: has no index {ordinal}; it has {len(known)} from {known[0]} to "
            f"{known[-1]}, the nearest is {close}."
        )
    arms = in_running_order({one.arm for one in records})
    records.sort(key=lambda one: (arms.index(one.arm), one.step))
    manifest = run.manifest
    yield (
        f"Index {ordinal} of {run.path}: {manifest['task']}, {manifest['length']} tokens, "
        f"{visible(manifest['backend'])}, {visible(manifest['model'])}"
    )
    verdict = _verdict(run.path, ordinal)
    if verdict:
        yield f"Verdict: {verdict}"
    yield ""
    yield from _question(run, records)
    yield ""
    yield from _outputs(records, run.records)
    yield ""
    yield from _times(records)
    yield ""
    yield from _commands(run, records)


def _verdict(folder: Path, ordinal: int) -> str | None:
    try:
        found = json.loads((folder / "verdict.json").read_text(encoding="utf-8"))
        one = next(one for one in found["indices"] if one["ordinal"] == ordinal)
        return f"{one['verdict']}. {visible(one['reason'])}"
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        return None


# --- question -----------------------------------------------------------------------------------


def _question(run: RunFolder, records: Sequence[Record]) -> Iterator[str]:
    first = records[0]
    yield f"Expected: {', '.join(visible(one, SHOWN_OUTPUT) for one in first.expected)}"
    prompt = prompts_of(run.path, {first.prompt_sha256}).get(first.prompt_sha256)
    depth = "" if first.depth is None else f", depth of the first needle {first.depth:.2f}"
    yield f"Prompt: {first.prompt_tokens} tokens, sha256 {first.prompt_sha256[:16]}{depth}"
    if prompt is None:
        yield (
            "The prompt's text is not in predictions/; python -m ruler_bench.prepare makes it from "
            "the run's settings."
        )
        return
    for place, expected in _needles(prompt, first.expected):
        around = prompt[max(0, place - SHOWN_AROUND) : place + len(expected) + SHOWN_AROUND]
        yield (
            f"Needle at character {place} of {len(prompt)} ({place / len(prompt):.0%}): "
            f"...{visible(around)}..."
        )
    yield f"It ends: ...{visible(prompt[-SHOWN_TAIL:])}"


def _needles(prompt: str, expected: Sequence[str]) -> list[tuple[int, str]]:
    places: list[tuple[int, str]] = []
    for one in expected:
        place = prompt.find(one) if one else -1
        while place >= 0 and len(places) < SHOWN_PLACES:
            places.append((place, one))
            place = prompt.find(one, place + 1)
    return sorted(places)


# --- answers ------------------------------------------------------------------------------------


def _outputs(records: Sequence[Record], everything: Sequence[Record]) -> Iterator[str]:
    control = _control(records)
    against = " ".join(records[0].expected) if control is None else control.output or ""
    what = "the expected answer" if control is None else f"the answer of {control.arm}"
    yield f"Outputs (^ marks characters that {what} does not have, _ where it has more):"
    outputs = {
        (one.arm, one.life, one.ordinal): one.output for one in everything if one.output is not None
    }
    for record in records:
        yield f"  {record.arm}: {state_of(record)}" + (
            "" if record.score is None else f", score {record.score:.0f}"
        )
        if record.error is not None:
            yield f"    error: {visible(record.error, SHOWN_OUTPUT)}"
        else:
            text, marks = marked(record.output or "", against)
            yield f"    {text}" if text else "    (empty)"
            if marks.strip():
                yield f"    {marks}"
        yield f"    {_before(record, outputs)}"


def _control(records: Sequence[Record]) -> Record | None:
    right = [one for one in records if one.correct]
    named = [one for name in CONTROLS for one in right if one.arm == name]
    return next(iter(named or right), None)


def _before(record: Record, outputs: Mapping[tuple[str, int, int], str]) -> str:
    if record.predecessor is None:
        return "nothing was asked of this engine before"
    before = outputs.get((record.arm, record.life, record.predecessor))
    said = "failed" if before is None else f"answered {visible(before, 80)!r}"
    return f"position {record.position}, after index {record.predecessor}, which {said}"


def marked(output: str, against: str) -> tuple[str, str]:
    """Return an output on one line, and a line that marks what in it is not in another text.

    Blank ends count for nothing.
    """
    output = output.strip()
    shown, other = output[:SHOWN_OUTPUT], against.strip()[:SHOWN_OUTPUT]
    text, marks = "", ""
    matcher = difflib.SequenceMatcher(None, other, shown, autojunk=False)
    for kind, _, _, start, end in matcher.get_opcodes():
        part = visible(shown[start:end])
        if kind == "delete":
            part = " " if start < len(shown) else ""
            marks += "_"
            text += part
            continue
        text += part
        marks += (" " if kind == "equal" else "^") * len(part)
    if len(output) > SHOWN_OUTPUT:
        text += f"... ({len(output)} characters)"
    return text, marks.rstrip()


def _times(records: Sequence[Record]) -> Iterator[str]:
    columns: dict[str, list[str]] = {
        "arm": [one.arm for one in records],
        "life": [str(one.life) for one in records],
        "position": [str(one.position) for one in records],
        "ended by": [visible(one.finish_reason or "-") for one in records],
        "time": [human_seconds(one.total_seconds) for one in records],
        "first token": [human_seconds(one.ttft_seconds) for one in records],
        "decode": [human_seconds(one.decode_seconds) for one in records],
        "up": [human_bytes(one.bytes_up) for one in records],
        "down": [human_bytes(one.bytes_down) for one in records],
        "peak": [human_bytes(one.peak_device_bytes) for one in records],
        "density": [human_number(one.density, 3) for one in records],
        "least margin": [
            human_number(min(one.top2_margin) if one.top2_margin else None, 3) for one in records
        ],
    }
    known = {name: cells for name, cells in columns.items() if set(cells) != {"-"}}
    yield tabulate(known, headers="keys", tablefmt="simple", disable_numparse=True)


# --- commands -----------------------------------------------------------------------------------

IN_ORDER = "ordinal"
OWN_KEYS = frozenset(
    {"arms", "indices", "num_samples", "out", "overwrite", "dry_run", "minimise", "suite", "task",
     "length", "stop_on", "engine_per", "workers", "fresh.on", "fresh.audit", "progress"}
)  # fmt: skip
"""Settings that the command below has its own of, or that change no answer of one sample."""


def _commands(run: RunFolder, records: Sequence[Record]) -> Iterator[str]:
    yield "Ask it again, alone and after what its engine had served:"
    ordinal = records[0].ordinal
    for arm in dict.fromkeys(one.arm for one in records):
        yield f"  {arm}: {command(run, arm, str(ordinal))}"
        last = next(one for one in reversed(records) if one.arm == arm)
        before = sorted(
            one.ordinal
            for one in run.records
            if (one.arm, one.life) == (arm, last.life) and one.position <= last.position
        )
        if len(before) == 1:
            continue
        if run.facts[arm].arm.to_manifest()["order"] == IN_ORDER:
            yield f"  {arm}: {command(run, arm, ','.join(as_indices(before)))}"
        elif arm not in REFERENCES:
            path = shlex.quote(str(run.path))
            yield (
                f"  {arm}: python -m ruler_bench.minimise {path} --arm {arm} --ordinal {ordinal}"
            )


def command(run: RunFolder, arm: str, indices: str) -> str:
    """Return the command that asks these samples in one arm: the run's own, narrowed down.

    Of a key that was given more than once the last counts, as it did in the run.
    """
    words = [str(word) for word in run.manifest.get("command") or []][3:]
    swept = bool({"-m", "--multirun"} & set(words))
    config = run.manifest.get("config") or {}
    kept: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        key = key.lstrip("+")
        if not equals or key in OWN_KEYS:
            continue
        kept.pop(key, None)  # the place of the last one counts, too
        is_varied = swept and _is_choice(value)
        kept[key] = f"{key}={_own_value(run.manifest, config, key)}" if is_varied else word
    manifest = run.manifest
    own = [f"task={manifest['task']}", f"length={manifest['length']}", f"arms=[{arm}]"]
    own += ["fresh.on=all"] * run.facts[arm].arm.is_fresh
    own += [f"indices=[{indices}]", f"out=again_{arm}_{indices.replace(',', '_')}"]
    return shlex.join(["python", "-m", "ruler_bench", *kept.values(), *own])


def _is_choice(value: str) -> bool:
    """Tell whether a value is several for a sweep: commas within brackets and quotes part none."""
    bare = value
    while (shorter := _ENCLOSED.sub("", bare)) != bare:
        bare = shorter
    return "," in bare


_ENCLOSED = re.compile(r"""\[[^][]*\]|\{[^}{]*\}|'[^']*'|"[^"]*\"""")


def _own_value(manifest: Mapping[str, Any], config: Mapping[str, Any], key: str) -> str:
    """Return what a key that a sweep varied was in this run."""
    if key in ("backend", "model"):
        return str(manifest[key])
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, dict):
        value = value.get("name")
    return value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    sys.exit(main())

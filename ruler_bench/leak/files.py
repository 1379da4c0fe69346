"""Answers from files: run folders, records, the reference's predictions, lm-eval's sample logs.

Sources of the formats: https://github.com/NVIDIA/RULER/blob/c3f5e3b/scripts/pred/call_api.py (one
object a line with index, pred, input, outputs; `index` is a character offset by mistake, so that
the ordinal is the place of the line) and
https://github.com/EleutherAI/lm-evaluation-harness/blob/034ab03/lm_eval/loggers/evaluation_tracker.py
(samples_TASK_DATE.jsonl: doc_id, doc, target, arguments, resps, filtered_resps; requests are served
in another order, longest first, so that what was served before is not known).
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ruler_bench.errors import UsageError, one_line
from ruler_bench.leak.arms import ONE_ENGINE, Arm
from ruler_bench.leak.join import ArmFacts, arm_facts
from ruler_bench.manifest import MANIFEST, RECORDS, read_manifest
from ruler_bench.records import Record, read_records
from ruler_bench.score import FULL_SCORE, score

RECORDED, PREDICTED, LM_EVAL = "records", "predictions", "lm-eval"
NAMELESS = "answers"
"""Arm of files that do not name one."""

_DATE = re.compile(r"_\d{4}-\d\d-\d\dT[0-9-.]+$")


@dataclass(frozen=True)
class Source:
    """Answers of one file or folder.

    Attributes:
        path: where they are from.
        kind: RECORDED, PREDICTED or LM_EVAL.
        records: the answers; of files without arms under the arm NAMELESS.
        facts: of each arm.
        manifest: of a run; None where there is none.
        prompts: texts of prompts by the hash in the records.
        notes: what was found on the way.
    """

    path: Path
    kind: str
    records: tuple[Record, ...]
    facts: Mapping[str, ArmFacts]
    manifest: Mapping[str, Any] | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def arms(self) -> list[str]:
        """The arms that it has answers of."""
        return list(dict.fromkeys(record.arm for record in self.records))


def read_source(path: Path) -> Source:
    """Read a run folder or a file of answers; what it is shows in its first line.

    Raises:
        UsageError: there is nothing, it is damaged, empty or of an unknown format.
    """
    path = answers_file(path)
    if path.name == RECORDS and path.parent.joinpath(MANIFEST).exists():
        return _recorded(path)
    rows, notes = json_rows(path)
    keys = set(rows[0])
    if {"arm", "step", "ordinal"} <= keys:
        return _recorded(path)
    if "doc_id" in keys:
        return _lm_eval(path, rows, notes)
    if "pred" in keys:
        return _predicted(path, rows, notes)
    raise UsageError(
        f"{path}: its lines are neither records (arm, step, ...), predictions (pred, outputs, ...) "
        f"nor lm-eval's samples (doc_id, resps, ...); the first has {', '.join(sorted(keys)[:6])}."
    )


def json_rows(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the objects of a file of answers, and what is to be said about it.

    Raises:
        UsageError: it cannot be read, is something else, is damaged, or is empty.
    """
    _check_kind(path)
    return _rows(path)


def answers_file(path: Path) -> Path:
    """Return the file of answers that a path names: itself, or the one in a folder.

    Raises:
        UsageError: there is none, or there are several.
    """
    if path.is_dir():
        return path / RECORDS if (path / RECORDS).exists() else _only_file(path)
    if not path.is_file():
        raise UsageError(f"{path}: there is no such file or folder; name {WANTED}.")
    return path


WANTED = (
    "a run folder, records.jsonl, a prediction file TASK.jsonl or lm-eval's samples_TASK_DATE.jsonl"
)


def _check_kind(path: Path) -> None:
    """Refuse a file that is something else than lines of JSON objects.

    Raises:
        UsageError: says what it looks like.
    """
    try:
        with path.open("rb") as file:
            start = file.read(4096)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}).") from error
    kind = _other_kind(start)
    if kind is not None:
        raise UsageError(f"{path}: is no file of answers but looks like {kind}; name {WANTED}.")


_MAGIC = {
    b"PK\x03\x04": "a zip archive",
    b"\x1f\x8b": "gzip data (unpack it first)",
    b"PAR1": "a Parquet file",
    b"SQLite format 3": "an SQLite database",
    b"%PDF": "a PDF",
}


def _other_kind(start: bytes) -> str | None:
    """Return what else a file is by its first bytes; None where they may begin a line of JSON."""
    magic = next((kind for mark, kind in _MAGIC.items() if start.startswith(mark)), None)
    if magic is not None:
        return magic
    if b"\0" in start:
        return "binary data"
    text = start.decode("utf-8", errors="replace").lstrip("\ufeff \t\r\n")
    if not text or text.startswith("{"):
        return _one_object(text)
    if text.startswith(("[", "<")):
        return "one JSON list (a line each is wanted)" if text.startswith("[") else "XML or HTML"
    return "a table (CSV)" if {",", "\t"} & {*text.splitlines()[0]} else "plain text"


def _one_object(text: str) -> str | None:
    """Return what a JSON object over several lines is, or None where its first line is whole."""
    if text.splitlines()[:1] != ["{"]:
        return None
    names = {'"schema_version"': "a verdict", '"format_version"': "a manifest"}
    kind = next((kind for key, kind in names.items() if key in text), "one JSON object")
    return f"{kind} over several lines"


def _only_file(folder: Path) -> Path:
    found = sorted(folder.glob("samples_*.jsonl")) or sorted(folder.glob("*.jsonl"))
    if len(found) == 1:
        return found[0]
    names = ", ".join(one.name for one in found[:5])
    raise UsageError(
        f"{folder}: is no run folder and holds {len(found)} files of answers"
        + (f" ({names}); name one of them." if found else "; name a run folder or a file.")
    )


def _rows(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the objects of a JSON-lines file, and what is to be said about it."""
    try:
        lines = path.read_bytes().decode("utf-8", errors="replace").split("\n")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}).") from error
    rows: list[dict[str, Any]] = []
    notes = []
    last = max((number for number, line in enumerate(lines) if line.strip()), default=-1)
    for number, line in enumerate(lines[: last + 1]):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("not a JSON object")
        except (ValueError, RecursionError) as error:
            if number == last and rows and number == len(lines) - 1:
                notes.append(f"{path}: the last line is cut off and was left out.")
                continue
            raise UsageError(
                f"{path} line {number + 1} is damaged ({one_line(error)}); restore the file from a "
                "copy."
            ) from error
        rows.append(row)
    if not rows:
        raise UsageError(f"{path}: holds no answers.")
    return rows, notes


# --- our own records ----------------------------------------------------------------------------


def _recorded(path: Path) -> Source:
    folder = path.parent
    records = read_records(path)
    if not records:
        raise UsageError(f"{path}: holds no answers.")
    manifest = read_manifest(folder)
    notes = [] if manifest else [f"{path}: no {MANIFEST} beside it, so that settings are unknown."]
    return Source(
        path=folder if path.name == RECORDS else path,
        kind=RECORDED,
        records=tuple(records),
        facts=arm_facts(manifest or {}, records, str(folder)),
        manifest=manifest,
        prompts=_prompts_beside(folder, {record.prompt_sha256 for record in records}),
        notes=tuple(notes),
    )


def _prompts_beside(folder: Path, wanted: set[str]) -> dict[str, str]:
    """Return the prompts that the run's own predictions hold, as far as records ask for them."""
    found = {}
    for path in sorted((folder / "predictions").glob("*.jsonl")):
        try:
            rows, _ = _rows(path)
        except UsageError:
            continue
        for row in rows:
            text = row.get("input")
            if isinstance(text, str):
                found[text_hash(text)] = text
    return {key: text for key, text in found.items() if key in wanted}


def text_hash(text: str) -> str:
    """Return the hash by which a record names a prompt."""
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()


# --- files of others ----------------------------------------------------------------------------


def _predicted(path: Path, rows: Sequence[dict[str, Any]], notes: Sequence[str]) -> Source:
    task = path.stem
    records, prompts = [], {}
    for place, row in enumerate(rows):
        expected = _texts(row.get("outputs", row.get("output")))
        text = row["pred"]
        if not isinstance(text, str):
            raise UsageError(f"{path} line {place + 1}: pred is no text.")
        prompt = row.get("input")
        mark = ""
        if isinstance(prompt, str) and prompt:
            mark = f"{PREDICTED}:{text_hash(prompt)}"
            prompts[mark] = prompt
        records.append(
            _answer(task=task, ordinal=place, place=place, expected=expected, text=text, mark=mark)
        )
    facts = {NAMELESS: _facts(path, order_known=True)}
    return Source(path, PREDICTED, tuple(records), facts, None, prompts, tuple(notes))


def _lm_eval(path: Path, rows: Sequence[dict[str, Any]], notes: Sequence[str]) -> Source:
    task = _DATE.sub("", path.stem.removeprefix("samples_"))
    records, prompts = {}, {}
    for place, row in enumerate(rows):
        ordinal = row["doc_id"]
        if isinstance(ordinal, bool) or not isinstance(ordinal, int) or ordinal < 0:
            raise UsageError(f"{path} line {place + 1}: doc_id is no number from 0.")
        if ordinal in records:
            continue  # the same answer again, through another filter
        doc = row.get("doc")
        outputs = _texts(doc.get("outputs")) if isinstance(doc, dict) else ()
        text = _response(path, place, row)
        prompt = _argument(row.get("arguments"))
        mark = "" if prompt is None else f"{LM_EVAL}:{text_hash(prompt)}"
        if prompt is not None:
            prompts[mark] = prompt
        expected = outputs or _target(row.get("target"))
        record = _answer(
            task=task, ordinal=ordinal, place=place, expected=expected, text=text, mark=mark
        )
        records[ordinal] = record if outputs else _with_metric(record, row)
    facts = {NAMELESS: _facts(path, order_known=False)}
    return Source(path, LM_EVAL, tuple(records.values()), facts, None, prompts, tuple(notes))


def _facts(path: Path, order_known: bool) -> ArmFacts:
    arm = Arm(name=NAMELESS, lifetime=ONE_ENGINE, backend="", settings={})
    return ArmFacts(arm, source=str(path), order_known=order_known)


def _answer(
    *, task: str, ordinal: int, place: int, expected: tuple[str, ...], text: str, mark: str
) -> Record:
    points = score("part" if task.startswith("qa") else "all", text, expected) if expected else None
    return Record(
        arm=NAMELESS,
        step=place,
        ordinal=ordinal,
        task=task,
        length=0,
        life=1,
        position=place,
        predecessor=None,
        expected=expected,
        depth=None,
        prompt_sha256=mark,
        prompt_tokens=0,
        output=text,
        score=points,
        correct=None if points is None else points == FULL_SCORE,
    )


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list):
        return tuple(str(one) for one in value)
    return ()


def _target(value: Any) -> tuple[str, ...]:
    """Return the expected answers of a target, which lm-eval writes as text, lists included."""
    if isinstance(value, str) and value.startswith("["):
        try:
            return _texts(ast.literal_eval(value)) or (value,)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return (value,)
    return _texts(value)


def _response(path: Path, place: int, row: Mapping[str, Any]) -> str:
    for key in ("resps", "filtered_resps"):
        value = row.get(key)
        while isinstance(value, list) and len(value) == 1:
            value = value[0]
        if isinstance(value, str):
            return value
    raise UsageError(
        f"{path} line {place + 1}: holds no generated text (resps); log-likelihoods of choices "
        "cannot be compared here."
    )


def _argument(value: Any) -> str | None:
    """Return the prompt: the first argument of the first request."""
    for key in ("gen_args_0", "arg_0"):
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list) and value:
            value = value[0]
    return value if isinstance(value, str) and value else None


def _with_metric(record: Record, row: Mapping[str, Any]) -> Record:
    """Return the record scored as the log says, where a task is not RULER's."""
    for name in row.get("metrics") or ():
        value = row.get(name)
        if isinstance(value, (int, float)) and 0 <= value <= 1:
            return replace(record, score=FULL_SCORE * value, correct=value == 1)
    return record


# --- several sources ----------------------------------------------------------------------------


def aligned(sources: Sequence[Source]) -> list[Source]:
    """Return the sources with ordinals that mean the same in all of them.

    Lines of predictions count from 0, so that one missing line shifts all after it. Where the
    prompts are known and the same, they say which sample a line is about.
    """
    first = sources[0]
    return [first, *(_align(first, one) for one in sources[1:])]


def _align(first: Source, other: Source) -> Source:
    if PREDICTED not in (first.kind, other.kind):
        return other
    known: dict[str, int] = {}
    for record in first.records:
        known.setdefault(_bare(record), record.ordinal)
    places = [known.get(_bare(record)) for record in other.records if record.prompt_sha256]
    if len(set(known)) != len({record.ordinal for record in first.records}) or None in places:
        return other
    if len(places) != len(other.records) or other.kind == RECORDED:
        return other
    return replace(
        other,
        records=tuple(
            replace(record, ordinal=place)
            for record, place in zip(other.records, places, strict=True)
            if place is not None
        ),
    )


def _bare(record: Record) -> str:
    return record.prompt_sha256.rpartition(":")[2]

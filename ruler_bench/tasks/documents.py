"""Questions and documents for qa: SQuAD v2 dev and HotpotQA dev (distractor), as published.

https://github.com/NVIDIA/RULER/blob/c3f5e3b/scripts/data/synthetic/qa.py

Every distinct text is one document, in sorted order; a question names those that it needs by their
place in it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ruler_bench.errors import UsageError, one_line
from ruler_bench.folders import sources_dir

DATASETS = ("squad", "hotpotqa")
FETCH = "python scripts/fetch_data.py"


@dataclass(frozen=True)
class QaItem:
    """One question.

    Attributes:
        question: its text.
        answers: every accepted answer.
        needed: documents that hold the answer, or that come with the question.
        related: documents of the same article, taken before any other.
    """

    question: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    related: tuple[int, ...]


@dataclass(frozen=True)
class QaSource:
    """A file of questions, read.

    Attributes:
        path: of the file.
        items: in the order of the file; sample i asks question i.
        documents: every distinct text, sorted.
    """

    path: Path
    items: tuple[QaItem, ...]
    documents: tuple[str, ...]


def source_path(dataset: str, folder: Path | None) -> Path:
    """Return where a data set is read from: the named folder, else the one of fetched files."""
    return (sources_dir() if folder is None else folder) / f"{dataset}.json"


def load_documents(dataset: str, folder: Path | None) -> QaSource:
    """Read a data set.

    Raises:
        UsageError: the file is missing or broken, or has another schema.
    """
    path = source_path(dataset, folder)
    try:
        state = path.stat()
    except OSError as error:
        raise _unreadable(path, dataset, error) from error
    return _parse(path, dataset, (state.st_mtime_ns, state.st_size))


def fingerprint(dataset: str, folder: Path | None) -> dict[str, str]:
    """Return the data set's name and the hash of its file.

    Raises:
        UsageError: the file is missing.
    """
    path = source_path(dataset, folder)
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(path, dataset, error) from error
    return {"dataset": dataset, "sha256": digest}


def _unreadable(path: Path, dataset: str, error: OSError) -> UsageError:
    if not isinstance(error, FileNotFoundError):
        return UsageError(f"{path}: cannot be read ({error.strerror}).")
    return UsageError(
        f"{path} is missing: {FETCH} {dataset}, or name a folder that has it with qa_data=DIR."
    )


@cache
def _parse(path: Path, dataset: str, _state: tuple[int, int]) -> QaSource:
    """Read a file; `_state` (time and size) tells one version of it from another."""
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise _unreadable(path, dataset, error) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: is no JSON ({one_line(error)}); {FETCH} {dataset}") from error
    try:
        items, documents = READERS[dataset](data)
    except _OtherSchemaError as error:
        raise UsageError(
            f"{path}: has not the schema of {SCHEMAS[dataset]}: {error}; {FETCH} {dataset}"
        ) from error
    if not items:
        raise UsageError(f"{path}: holds no question that can be asked; {FETCH} {dataset}")
    return QaSource(path, tuple(items), tuple(documents))


class _OtherSchemaError(Exception):
    """A value is not where it should be, or of another type."""


def _get(owner: Any, key: str | int, kind: type | tuple[type, ...], where: str) -> Any:
    """Return a value that must be there and of a type."""
    try:
        value = owner[key]
    except (KeyError, IndexError, TypeError):
        raise _OtherSchemaError(f"{where} has no {key!r}") from None
    if not isinstance(value, kind):
        raise _OtherSchemaError(f"{where}[{key!r}] is {type(value).__name__}")
    return value


def _read_squad(data: Any) -> tuple[list[QaItem], list[str]]:
    articles = [
        [
            (f"data[{a}].paragraphs[{p}]", paragraph)
            for p, paragraph in enumerate(_get(article, "paragraphs", list, f"data[{a}]"))
        ]
        for a, article in enumerate(_get(data, "data", list, "the file"))
    ]
    texts = [[_get(one, "context", str, where) for where, one in article] for article in articles]
    documents, place = _numbered(text for article in texts for text in article)
    items = []
    for article, contexts in zip(articles, texts, strict=True):
        places = [place[text] for text in contexts]
        for (where, paragraph), own in zip(article, places, strict=True):
            related = tuple(one for one in places if one != own)
            for q, qa in enumerate(_get(paragraph, "qas", list, where)):
                here = f"{where}.qas[{q}]"
                if _get(qa, "is_impossible", bool, here):
                    continue
                answers = _get(qa, "answers", list, here)
                texts_of = tuple(_get(one, "text", str, f"{here}.answers") for one in answers)
                if not texts_of:
                    raise _OtherSchemaError(f"{here} has no answers")
                items.append(QaItem(_get(qa, "question", str, here), texts_of, (own,), related))
    return items, documents


def _read_hotpotqa(data: Any) -> tuple[list[QaItem], list[str]]:
    if not isinstance(data, list):
        raise _OtherSchemaError(f"the file is {type(data).__name__}, not a list")
    contexts = []
    for number, one in enumerate(data):
        pairs = _get(one, "context", list, f"[{number}]")
        contexts.append([_hotpotqa_text(pair, f"[{number}].context") for pair in pairs])
    documents, place = _numbered(text for texts in contexts for text in texts)
    items = [
        QaItem(
            question=_get(one, "question", str, f"[{number}]"),
            answers=(_get(one, "answer", str, f"[{number}]"),),
            needed=tuple(place[text] for text in texts),
            related=(),
        )
        for number, (one, texts) in enumerate(zip(data, contexts, strict=True))
    ]
    return items, documents


def _hotpotqa_text(pair: Any, where: str) -> str:
    title, sentences = _get(pair, 0, str, where), _get(pair, 1, list, where)
    if not all(isinstance(sentence, str) for sentence in sentences):
        raise _OtherSchemaError(f"{where} holds a sentence that is no text")
    return f"{title}\n{''.join(sentences)}"


def _numbered(texts: Any) -> tuple[list[str], dict[str, int]]:
    documents = sorted(set(texts))
    return documents, {text: number for number, text in enumerate(documents)}


Reader = Callable[[Any], tuple[Sequence[QaItem], Sequence[str]]]
READERS: dict[str, Reader] = {"squad": _read_squad, "hotpotqa": _read_hotpotqa}
SCHEMAS = {"squad": "SQuAD v2 (dev-v2.0.json)", "hotpotqa": "HotpotQA's dev distractor file"}

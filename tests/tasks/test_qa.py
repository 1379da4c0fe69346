"""qa: which documents, in which order, and what a file of questions may be."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ruler_bench.errors import UsageError
from ruler_bench.tasks import DataSpec, generate
from ruler_bench.tasks.documents import load_documents

MakeSpec = Callable[..., DataSpec]


def shown(text: str) -> list[str]:
    """Return the documents of a prompt after a check of their numbers."""
    context = text.split("given documents.\n\n", 1)[1].partition("\n\nAnswer the question")[0]
    found = re.split(r"(?:^|\n\n)Document (\d+):\n", context)
    assert [int(one) for one in found[1::2]] == list(range(1, len(found) // 2 + 1))
    return found[2::2]


def test_squad_shows_the_paragraph_its_article_and_others(spec: MakeSpec, qa_data: Path) -> None:
    articles = json.loads((qa_data / "squad.json").read_text())["data"]
    asked = [
        (qa, paragraph["context"], [one["context"] for one in article["paragraphs"]])
        for article in articles
        for paragraph in article["paragraphs"]
        for qa in paragraph["qas"]
        if not qa["is_impossible"]
    ]
    samples = generate(spec("qa_1", 2500, qa_data=qa_data), 12)
    for sample, (qa, gold, article) in zip(samples, asked, strict=False):
        documents = shown(sample.input)
        assert sample.input.endswith(f"Question: {qa['question']}")
        assert sample.answer_prefix == " Answer:"
        assert list(sample.outputs) == [one["text"] for one in qa["answers"]]
        assert gold in documents
        assert set(article) <= set(documents)
        assert len(set(documents)) == len(documents)


def test_hotpotqa_shows_all_that_comes_with_the_question(spec: MakeSpec, qa_data: Path) -> None:
    items = json.loads((qa_data / "hotpotqa.json").read_text())
    samples = generate(spec("qa_2", 2500, qa_data=qa_data), 6)
    for sample, item in zip(samples, items, strict=False):
        documents = shown(sample.input)
        assert {f"{title}\n{''.join(text)}" for title, text in item["context"]} <= set(documents)
        assert sample.outputs == (item["answer"],)


def test_the_gold_document_has_one_place_where_the_number_is_the_same(
    spec: MakeSpec, qa_data: Path
) -> None:
    """The order is shuffled with the run's seed, alike in every sample."""
    gold = json.loads((qa_data / "hotpotqa.json").read_text())
    places = {}
    for ordinal, sample in enumerate(generate(spec("qa_2", 2500, qa_data=qa_data), 12)):
        title, text = gold[ordinal]["context"][0]
        documents = shown(sample.input)
        places.setdefault(len(documents), set()).add(documents.index(f"{title}\n{''.join(text)}"))
    assert all(len(found) == 1 for found in places.values())
    assert len(places) < 12


def few(folder: Path, qa_data: Path) -> Path:
    """Keep the first articles of SQuAD, so that a prompt has room for more than all documents."""
    data = json.loads((qa_data / "squad.json").read_text())
    data["data"] = data["data"][:4]
    (folder / "squad.json").write_text(json.dumps(data))
    return folder


def test_few_documents_are_repeated_in_order(spec: MakeSpec, qa_data: Path, tmp_path: Path) -> None:
    folder = few(tmp_path, qa_data)
    documents = load_documents("squad", folder).documents
    shows = shown(generate(spec("qa_1", 4000, qa_data=folder), 1)[0].input)
    assert len(shows) > 2 * len(documents)
    assert set(shows) == set(documents)
    counts = {shows.count(one) for one in documents}
    assert max(counts) - min(counts) <= 1


def test_fewer_questions_than_samples(spec: MakeSpec, qa_data: Path) -> None:
    with pytest.raises(
        UsageError,
        match=r"hotpotqa.json has 40 questions, fewer than the 41 .*"
        r"num_samples=40",
    ):
        generate(spec("qa_2", 2500, qa_data=qa_data), 41)
    assert len(generate(spec("qa_2", 2500, qa_data=qa_data), 40)) == 40


def test_missing_files_name_the_command(spec: MakeSpec, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"squad.json is missing: python scripts/fetch_data.py sq"):
        generate(spec("qa_1", qa_data=tmp_path), 1)
    with pytest.raises(UsageError, match=r"hotpotqa.json is missing: .*qa_data=DIR"):
        spec("qa_2").fingerprint()


def first_question(data: Any) -> dict[str, Any]:
    return next(
        qa
        for article in data["data"]
        for paragraph in article["paragraphs"]
        for qa in paragraph["qas"]
        if not qa["is_impossible"]
    )


def no_impossible(data: Any) -> None:
    del first_question(data)["is_impossible"]


def no_answers(data: Any) -> None:
    first_question(data)["answers"] = []


def version_1(data: Any) -> None:
    data["data"] = {"paragraphs": []}


def no_paragraphs(data: Any) -> None:
    del data["data"][0]["paragraphs"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (no_impossible, r"data\[\d+\].paragraphs\[\d+\].qas\[\d+\] has no 'is_impossible'"),
        (no_answers, "has no answers"),
        (version_1, r"\['data'\] is dict"),
        (no_paragraphs, r"data\[0\] has no 'paragraphs'"),
    ],
)
def test_another_schema_of_squad_is_named(
    spec: MakeSpec, qa_data: Path, tmp_path: Path, change: Callable[[Any], None], message: str
) -> None:
    data = json.loads((qa_data / "squad.json").read_text())
    change(data)
    (tmp_path / "squad.json").write_text(json.dumps(data))
    with pytest.raises(UsageError, match=rf"squad.json: has not the schema of SQuAD v2.*{message}"):
        generate(spec("qa_1", qa_data=tmp_path), 1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"data": []}, "the file is dict, not a list"),
        ([{"question": "q", "answer": "a"}], r"\[0\] has no 'context'"),
        ([{"question": "q", "context": []}], r"\[0\] has no 'answer'"),
        ([{"question": "q", "answer": "a", "context": [["t"]]}], "context has no 1"),
        ([{"question": "q", "answer": "a", "context": [["t", ["s", 1]]]}], "no text"),
        ([7], r"\[0\] has no 'context'"),
    ],
)
def test_another_schema_of_hotpotqa_is_named(
    spec: MakeSpec, tmp_path: Path, data: Any, message: str
) -> None:
    (tmp_path / "hotpotqa.json").write_text(json.dumps(data))
    with pytest.raises(UsageError, match=rf"has not the schema of HotpotQA.*{message}"):
        generate(spec("qa_2", qa_data=tmp_path), 1)


@pytest.mark.parametrize(
    ("content", "message"), [("[", "is no JSON"), ("[]", "holds no question"), ("", "is no JSON")]
)
def test_a_broken_file(spec: MakeSpec, tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "hotpotqa.json").write_text(content)
    with pytest.raises(UsageError, match=message):
        generate(spec("qa_2", qa_data=tmp_path), 1)


def test_a_question_with_more_documents_than_the_smallest_prompt(
    spec: MakeSpec, qa_data: Path, tmp_path: Path
) -> None:
    data = json.loads((qa_data / "hotpotqa.json").read_text())
    data[0]["context"] += [[f"more {one}", ["text"]] for one in range(3)]
    (tmp_path / "hotpotqa.json").write_text(json.dumps(data))
    with pytest.raises(UsageError, match="question 0 comes with 13 documents"):
        generate(spec("qa_2", 2500, qa_data=tmp_path), 1)


def test_the_file_and_not_its_place_decides_the_data(
    spec: MakeSpec, qa_data: Path, tmp_path: Path
) -> None:
    shutil.copy(qa_data / "squad.json", tmp_path)
    here, there = (spec("qa_1", qa_data=folder) for folder in (qa_data, tmp_path))
    assert here.fingerprint() == there.fingerprint()
    (tmp_path / "squad.json").write_text((tmp_path / "squad.json").read_text() + "\n")
    assert here.fingerprint() != there.fingerprint()

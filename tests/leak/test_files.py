"""Reading answers: run folders, records, the reference's predictions, lm-eval's logs."""

import json

import pytest

from ruler_bench.errors import UsageError
from ruler_bench.leak.files import LM_EVAL, PREDICTED, RECORDED, aligned, read_source, text_hash
from ruler_bench.records import to_line


def _lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _predictions(made, ordinals, wrong=()):
    """As the reference writes them: index is a character offset, the same for many lines."""
    return [
        {
            "index": 1721,
            "pred": " 99" if one in wrong else f" {made.number(one)}.",
            "input": made.prompt(one),
            "outputs": [made.number(one)],
            "others": {},
            "truncation": -1,
            "length": 4091,
        }
        for one in ordinals
    ]


def _samples(made, ordinals, **changes):
    """As lm-eval writes them."""
    return [
        {
            "doc_id": one,
            "doc": {"outputs": [made.number(one)], "max_length": 4096, "input": made.prompt(one)},
            "target": str([made.number(one)]),
            "arguments": {"gen_args_0": {"arg_0": made.prompt(one), "arg_1": {"until": []}}},
            "resps": [[f" {made.number(one)}."]],
            "filtered_resps": [made.number(one)],
            "filter": "none",
            "metrics": ["4096"],
            "doc_hash": "d",
            "prompt_hash": "p",
            "target_hash": "t",
            "4096": 1.0,
            **changes,
        }
        for one in ordinals
    ]


def test_predictions_count_lines(made, tmp_path):
    source = read_source(
        _lines(tmp_path / "niah_single_1.jsonl", _predictions(made, range(4), wrong=[2]))
    )
    assert source.kind == PREDICTED
    assert [(one.ordinal, one.position, one.correct) for one in source.records] == [
        (0, 0, True),
        (1, 1, True),
        (2, 2, False),
        (3, 3, True),
    ]
    first = source.records[0]
    assert (first.task, first.expected, first.output_tokens) == (
        "niah_single_1",
        (made.number(0),),
        None,
    )
    assert source.prompts[first.prompt_sha256] == made.prompt(0)


def test_predictions_of_questions_and_answers_match_any_reference(tmp_path):
    row = {"index": 0, "pred": "It is Paris.", "outputs": ["Rome", "Paris"]}
    source = read_source(_lines(tmp_path / "qa_1.jsonl", [row]))
    assert source.records[0].correct


def test_lm_eval_counts_doc_ids_and_takes_the_first_filter(made, tmp_path):
    rows = _samples(made, [3, 1]) + _samples(made, [3], resps=[["other"]], filter="strict")
    source = read_source(
        _lines(tmp_path / "samples_niah_single_1_2026-01-02T03-04-05.678901.jsonl", rows)
    )
    assert source.kind == LM_EVAL
    assert [(one.ordinal, one.task, one.correct) for one in source.records] == [
        (3, "niah_single_1", True),
        (1, "niah_single_1", True),
    ]
    assert not source.facts["answers"].order_known


def test_lm_eval_of_other_tasks_takes_the_log_s_own_metric(made, tmp_path):
    row = {
        "doc_id": 0,
        "doc": {"question": "2 + 2?"},
        "target": "4",
        "arguments": [["2 + 2?", {}]],
        "resps": ["It is 14."],
        "filtered_resps": ["14"],
        "metrics": ["exact_match"],
        "exact_match": 0.0,
    }
    record = read_source(_lines(tmp_path / "samples_gsm8k.jsonl", [row])).records[0]
    assert (record.task, record.output, record.correct) == ("gsm8k", "It is 14.", False)
    assert record.prompt_sha256.endswith(text_hash("2 + 2?"))


def test_targets_that_are_lists_as_text(made, tmp_path):
    rows = _samples(made, [0], doc={}, target="['12', '34']", resps=[["34 and 12"]], metrics=[])
    record = read_source(_lines(tmp_path / "samples_t.jsonl", rows)).records[0]
    assert (record.expected, record.correct) == (("12", "34"), True)


def test_log_likelihoods_are_refused(made, tmp_path):
    rows = _samples(made, [0], resps=[["-1.5", "False"], ["-2", "False"]], filtered_resps=[[-1, 0]])
    with pytest.raises(UsageError, match="line 1: holds no generated text"):
        read_source(_lines(tmp_path / "samples_t.jsonl", rows))


def test_a_run_folder_brings_arms_and_prompts(made, tmp_path):
    folder = tmp_path / "run"
    _lines(folder / "predictions" / "niah_single_1.jsonl", _predictions(made, range(3)))
    (folder / "records.jsonl").write_text(
        "".join(to_line(one) for one in made.stream("persistent", 3))
    )
    manifest = {
        "format_version": 1,
        "task": "niah_single_1",
        "backend": "offload",
        "model": "probe",
        "metric": "all",
        "length": 4096,
        "lives": [],
        "arms": {"persistent": made.arm("persistent").to_manifest()},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for path in (folder, folder / "records.jsonl"):
        source = read_source(path)
        assert (source.kind, source.arms) == (RECORDED, ["persistent"])
        assert source.facts["persistent"].arm == made.arm("persistent")
        assert source.prompts == made.prompts(3)


def test_records_without_a_manifest_are_read_and_it_is_said(made, tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text("".join(to_line(one) for one in made.stream("persistent", 3)))
    source = read_source(path)
    assert not source.facts["persistent"].is_known
    assert any("no manifest.json" in note for note in source.notes)


def test_a_last_line_that_is_cut_off_is_left_out_and_it_is_said(made, tmp_path):
    path = _lines(tmp_path / "niah_single_1.jsonl", _predictions(made, range(3)))
    path.write_text(path.read_text()[:-30])
    source = read_source(path)
    assert len(source.records) == 2
    assert any("cut off" in note for note in source.notes)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "holds no answers"),
        ("\n\n", "holds no answers"),
        ('{"pred": "1"\n{"pred": "2"}\n', "line 1 is damaged"),
        ('{"pred": "1", "out', "line 1 is damaged"),
        ("[1]\n", "one JSON list"),
        ('{"question": 1}\n', "neither records"),
        ('{"pred": 4}\n', "pred is no text"),
        ('{"doc_id": "a"}\n', "doc_id is no number"),
    ],
)
def test_bad_files_are_named(tmp_path, text, named):
    path = tmp_path / "answers.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=named) as caught:
        read_source(path)
    assert str(path) in str(caught.value)


def test_empty_records_are_refused(tmp_path):
    (tmp_path / "records.jsonl").write_text("")
    with pytest.raises(UsageError, match="holds no answers"):
        read_source(tmp_path)


def test_a_folder_must_hold_one_file(made, tmp_path):
    with pytest.raises(UsageError, match="holds 0 files"):
        read_source(tmp_path)
    with pytest.raises(UsageError, match="no such file"):
        read_source(tmp_path / "none")
    for name in ("a.jsonl", "b.jsonl"):
        _lines(tmp_path / name, _predictions(made, [0]))
    with pytest.raises(UsageError, match=r"holds 2 files of answers \(a.jsonl, b.jsonl\)"):
        read_source(tmp_path)
    (tmp_path / "a.jsonl").unlink()
    assert read_source(tmp_path).path == tmp_path / "b.jsonl"


def test_a_missing_line_does_not_shift_the_others(made, tmp_path):
    whole = read_source(_lines(tmp_path / "a" / "t.jsonl", _predictions(made, range(5))))
    gap = read_source(_lines(tmp_path / "b" / "t.jsonl", _predictions(made, [0, 2, 4])))
    assert [one.ordinal for one in aligned([whole, gap])[1].records] == [0, 2, 4]

"""`python -m ruler_bench.compare`: verdicts over files, without an engine."""

import hashlib
import json
import random
from xml.etree import ElementTree

import pytest

from ruler_bench.compare import main
from ruler_bench.records import Record, to_line

COUNT = 20
SETTINGS = {"attend_tokens": 512, "chunk_tokens": 1024, "dtype": "float32"}


def number(ordinal):
    return str(random.Random(f"answer {ordinal}").randint(10**6, 10**7 - 1))


def prompt(ordinal):
    return f"The special magic number for key-{ordinal} is: {number(ordinal)}. What is it?"


def predictions(path, wrong=None, ordinals=range(COUNT)):
    """Write a file as the reference does; `wrong` maps ordinals to outputs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for one in ordinals:
            row = {
                "index": 77,
                "pred": (wrong or {}).get(one, f" {number(one)}."),
                "input": prompt(one),
                "outputs": [number(one)],
            }
            file.write(json.dumps(row) + "\n")
    return str(path)


def samples(path, wrong=None):
    """Write a log as lm-eval does, longest prompts first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for one in range(COUNT):
            row = {
                "doc_id": one,
                "doc": {"outputs": [number(one)]},
                "target": number(one),
                "arguments": {"gen_args_0": {"arg_0": prompt(one)}},
                "resps": [[(wrong or {}).get(one, f" {number(one)}.")]],
                "filtered_resps": [number(one)],
            }
            file.write(json.dumps(row) + "\n")
    return str(path)


def run(folder, arm="persistent", wrong=None, settings=SETTINGS, **manifest):
    """Write a run folder with one arm."""
    folder.mkdir(parents=True)
    fresh = arm.startswith("fresh")
    with (folder / "records.jsonl").open("w") as file:
        for one in range(COUNT):
            text = (wrong or {}).get(one, f" {number(one)}.")
            ids = tuple(text.encode())
            record = Record(
                arm=arm,
                step=one,
                ordinal=one,
                task="niah_single_1",
                length=4096,
                life=one + 1 if fresh else 1,
                position=0 if fresh else one,
                predecessor=None,
                expected=(number(one),),
                depth=0.5,
                prompt_sha256=hashlib.sha256(prompt(one).encode()).hexdigest(),
                prompt_tokens=4000,
                output=text,
                output_tokens=ids,
                logits_digest=tuple(f"{text}{place}" for place in range(len(ids))),
                top2_margin=(9.0,) * len(ids),
                score=100.0 if number(one) in text else 0.0,
                correct=number(one) in text,
            )
            file.write(to_line(record))
    found = {
        "format_version": 1,
        "task": "niah_single_1",
        "backend": "offload",
        "model": "probe",
        "metric": "all",
        "length": 4096,
        "data": {"seed": 42, "fingerprint": "x"},
        "model_fingerprint": "abc",
        "backend_in_force": settings,
        "device": "CPU",
        "versions": {"torch": "2.13.0"},
        "lives": [{"arm": arm, "versions": {"torch": "2.13.0"}}],
    }
    (folder / "manifest.json").write_text(json.dumps(found | manifest))
    return str(folder)


CHANGED = (2, 4, 7, 9, 11, 13, 15, 18)
LEAKED = {one: f" {number(one - 1)}." for one in CHANGED}
WRONG = dict.fromkeys(CHANGED, " 12.")


def compare(cli, *arguments):
    return cli(*arguments, entry=main)


def test_prediction_files_by_place(cli, workdir):
    found = compare(
        cli,
        predictions(workdir / "a" / "niah_single_1.jsonl", LEAKED),
        predictions(workdir / "b" / "niah_single_1.jsonl"),
        predictions(workdir / "c" / "niah_single_1.jsonl"),
    )
    assert found.status == 3
    assert found.out.splitlines()[0] == (
        "niah_single_1: LEAK. 8 of 20 answers change when the engine has served others; "
        "first at position 2; index 2 prints the answer of index 1."
    )
    assert "counts as fresh_again, by its place" in found.out


def test_roles_by_option_and_what_is_written(cli, workdir):
    found = compare(
        cli,
        *("--persistent", predictions(workdir / "a.jsonl", WRONG)),
        *("--fresh", predictions(workdir / "b.jsonl")),
        *("--fresh-again", predictions(workdir / "c.jsonl")),
        *("--reference", predictions(workdir / "d.jsonl")),
        *("--out", "verdict"),
    )
    # The task is the file's name: these have different ones.
    assert (found.status, found.out) == (2, "")
    for name in "abcd":
        (workdir / name).mkdir()
        (workdir / f"{name}.jsonl").rename(workdir / name / "niah_single_1.jsonl")
    found = compare(
        cli, "--persistent", "a", "--fresh", "b", "--fresh-again", "c", "--reference", "d",
        "--out", "verdict",
    )  # fmt: skip
    assert found.status == 3
    read = json.loads((workdir / "verdict" / "verdict.json").read_text())
    assert (read["verdict"], read["counts"]["leak"]) == ("leak", 8)
    assert ElementTree.parse(workdir / "verdict" / "junit.xml").getroot().get("failures") == "8"
    assert "**niah_single_1: LEAK" in (workdir / "verdict" / "verdict.md").read_text()


def test_lm_eval_logs(cli, workdir):
    name = "samples_niah_single_1_2026-01-02T03-04-05.000001.jsonl"
    found = compare(
        cli,
        samples(workdir / "a" / name, LEAKED),
        samples(workdir / "b" / name),
        samples(workdir / "c" / name),
    )
    assert found.status == 3
    assert "the order in which the requests were served is not known" in found.out
    assert "prints the answer" not in found.out


def test_formats_may_be_mixed(cli, workdir):
    found = compare(
        cli,
        run(workdir / "run", wrong=WRONG),
        "--fresh",
        predictions(workdir / "b" / "niah_single_1.jsonl"),
        "--fresh-again",
        samples(workdir / "c" / "samples_niah_single_1.jsonl"),
    )
    assert (found.status, found.err) == (3, "")
    assert "8 of 20 answers change" in found.out


def test_runs_take_the_roles_that_their_records_tell(cli, workdir):
    found = compare(
        cli,
        run(workdir / "a", wrong=WRONG),
        run(workdir / "b", "fresh"),
        run(workdir / "c", "fresh"),
        run(workdir / "d", wrong=WRONG),
        run(workdir / "e", wrong=WRONG, settings=SETTINGS | {"chunk_tokens": 512}),
    )
    assert found.status == 3
    for said in (
        "c: its arm fresh counts as fresh_again",
        "d: its arm persistent counts as persistent_again",
        "e: its arm persistent counts as reference",
    ):
        assert said in found.out


def test_one_arm_says_what_is_needed(cli, workdir):
    found = compare(cli, predictions(workdir / "a" / "niah_single_1.jsonl", WRONG))
    assert found.status == 0
    assert "One arm alone (persistent, 20 answers, 8 wrong)" in found.out
    assert "needs fresh and fresh_again" in found.out


def test_two_arms_say_what_they_cannot_tell(cli, workdir):
    found = compare(cli, run(workdir / "a", wrong=WRONG), run(workdir / "b", "fresh"))
    assert found.status == 5
    assert "these arms cannot tell why: fresh_again is needed" in found.out


def test_max_unstable_lets_a_noisy_server_pass(cli, workdir):
    files = [
        predictions(workdir / name / "t.jsonl", {3: " 12."} if name == "c" else None)
        for name in "abc"
    ]
    assert compare(cli, *files).status == 5
    assert compare(cli, *files, "--max-unstable", "0.05").status == 0


def test_missing_ordinals_leave_the_intersection(cli, workdir):
    found = compare(
        cli,
        predictions(workdir / "a" / "t.jsonl"),
        predictions(workdir / "b" / "t.jsonl", ordinals=[0, 1, 3, *range(5, COUNT)]),
        predictions(workdir / "c" / "t.jsonl"),
    )
    assert found.status == 0
    assert "No answer of 18 changes" in found.out
    assert "fresh has no answer to ordinals 2, 4" in found.out


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"data": {"seed": 43, "fingerprint": "y"}}, "data.seed: 42 there, 43 here"),
        ({"model_fingerprint": "other"}, "model_fingerprint: abc there, other here"),
    ],
)
def test_runs_over_other_data_are_refused(cli, workdir, change, named):
    found = compare(cli, run(workdir / "a"), run(workdir / "b", "fresh", **change))
    assert found.status == 2
    assert named in found.err
    assert found.err.count("\n") == 1


def test_predictions_of_other_samples_are_refused(cli, workdir):
    found = compare(
        cli,
        predictions(workdir / "a" / "t.jsonl"),
        predictions(workdir / "b" / "t.jsonl", ordinals=range(30, 50)),
    )
    assert found.status == 2
    assert "ordinal 0: persistent and fresh were not asked the same (expected" in found.err


def test_a_role_that_the_records_contradict_is_refused(cli, workdir):
    run(workdir / "warm")
    run(workdir / "other")
    run(workdir / "cold", "fresh")
    found = compare(cli, "--fresh", "warm", "--persistent", "other")
    assert found.status == 2
    assert "one engine answered several samples" in found.err
    found = compare(cli, "--persistent", "cold")
    assert "each sample had an engine of its own" in found.err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "nothing to compare; usage"),
        (["--fersh", "a"], "usage"),
        (["none"], "there is no such file or folder"),
        (["a", "--max-unstable", "2"], "--max-unstable=2: must be a share"),
        (["a", "--out", "a/t.jsonl"], "--out a/t.jsonl: cannot be written"),
    ],
)
def test_wrong_usage_is_one_line(cli, workdir, arguments, named):
    predictions(workdir / "a" / "t.jsonl")
    found = compare(cli, *arguments)
    assert found.status == 2
    assert named in found.err
    assert found.err.count("\n") == 1


def test_a_truncated_file_is_read_as_far_as_it_goes(cli, workdir):
    files = [workdir / name / "t.jsonl" for name in "abc"]
    for path in files:
        predictions(path)
    files[1].write_text(files[1].read_text()[:-25])
    found = compare(cli, *map(str, files))
    assert found.status == 0
    assert "the last line is cut off and was left out" in found.out
    assert "No answer of 19 changes" in found.out


@pytest.mark.parametrize(
    ("arguments", "roles"),
    [
        (["a", "a"], "as argument 1 and as argument 2"),
        (["a", "a/t.jsonl"], "as argument 1 and as argument 2"),
        (["--fresh", "a", "--fresh-again", "b/../a/t.jsonl"], "as --fresh and as --fresh-again"),
        (["a", "--reference", "linked"], "as argument 1 and as --reference"),
    ],
)
def test_the_same_answers_in_two_roles_are_refused(cli, workdir, arguments, roles):
    predictions(workdir / "a" / "t.jsonl")
    predictions(workdir / "b" / "t.jsonl")
    (workdir / "linked").symlink_to(workdir / "a")
    found = compare(cli, *arguments)
    assert (found.status, found.out) == (2, "")
    assert f"is given twice, {roles}" in found.err
    assert found.err.count("\n") == 1


def test_more_files_than_roles_are_refused(cli, workdir):
    files = [predictions(workdir / name / "t.jsonl") for name in "abcde"]
    assert "its role is taken already" in compare(cli, *files).err


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"PK\x03\x04rest", "a zip archive"),
        (b"\x1f\x8b\x08", "gzip data"),
        (b"\x7fELF\x00\x00", "binary data"),
        (b'[{"pred": 1}]', "one JSON list"),
        (b"<?xml version='1.0'?>", "XML or HTML"),
        (b"index,pred\n1,2\n", "a table (CSV)"),
        (b"# A report\n\nwords", "plain text"),
        (b'{\n  "schema_version": 1\n}\n', "a verdict over several lines"),
        (b'{\n  "format_version": 1\n}\n', "a manifest over several lines"),
        (b'{\n  "other": 1\n}\n', "one JSON object over several lines"),
    ],
)
def test_a_file_of_another_kind_is_called_what_it_is(cli, workdir, content, kind):
    (workdir / "t.jsonl").write_bytes(content)
    found = compare(cli, "t.jsonl")
    assert (found.status, found.out) == (2, "")
    assert f"is no file of answers but looks like {kind}" in found.err
    assert "name a run folder, records.jsonl, a prediction file" in found.err
    assert "damaged" not in found.err
    assert found.err.count("\n") == 1


def test_an_empty_file_is_refused(cli, workdir):
    path = workdir / "t.jsonl"
    path.write_text("")
    found = compare(cli, str(path))
    assert found.status == 2
    assert "holds no answers" in found.err

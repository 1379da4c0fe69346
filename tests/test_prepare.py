"""`python -m ruler_bench.prepare`: where it writes, and what it refuses before it writes."""

import json
import os
import stat

import pytest

from ruler_bench import prepare
from ruler_bench.errors import UsageError
from ruler_bench.tasks.sample import Sample

SMALL = ("task=niah_single_1", "length=512", "num_samples=1")


@pytest.fixture
def refusal(cli):
    """Call the command with arguments that it refuses, and return the one line it says."""

    def call(*arguments):
        finished = cli(*SMALL, *arguments, entry=prepare.main)
        assert finished.status == 2
        assert len(finished.err.splitlines()) == 1, finished.err
        return finished.err

    return call


def sample(ordinal):
    return Sample(
        task="niah_single_1",
        ordinal=ordinal,
        input="a é",
        answer_prefix=" b",
        outputs=("c",),
        length=3,
        tokens_to_generate=1,
        depth=0.5,
        answer_offset=0,
        answer_token_position=0,
    )


def a_pipe(path):
    os.mkfifo(path)


def a_folder(path):
    path.mkdir()


def a_link_to_a_file(path):
    (path.parent / "file").write_text("kept")
    path.symlink_to(path.parent / "file")


def a_link_to_a_pipe(path):
    os.mkfifo(path.parent / "pipe")
    path.symlink_to(path.parent / "pipe")


def a_link_to_nothing(path):
    path.symlink_to(path.parent / "gone")


@pytest.mark.parametrize(
    "make", [a_pipe, a_folder, a_link_to_a_file, a_link_to_a_pipe, a_link_to_nothing]
)
def test_what_is_no_regular_file_is_left_alone(refusal, workdir, make):
    out = workdir / "out"
    make(out)
    before = {one.name: stat.S_IFMT(one.lstat().st_mode) for one in workdir.iterdir()}
    said = refusal(f"out={out}")
    assert f"out={out}: is " in said
    assert "name a regular file" in said
    assert {one.name: stat.S_IFMT(one.lstat().st_mode) for one in workdir.iterdir()} == before
    with pytest.raises(UsageError):
        prepare.write_samples([sample(0)], out)
    assert {one.name: stat.S_IFMT(one.lstat().st_mode) for one in workdir.iterdir()} == before


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ('out=""', "out is empty"),
        ("out=' '", "out is empty"),
        ("out=.", "out=.: is a folder"),
        ("out=new/", "out=new/: is a folder"),
        (f"out={'a' * 256}", "cannot be written (File name too long)"),
        (f"out={'a' * 5000}", "cannot be written (File name too long)"),
        ("out=there/x", "cannot be written (Not a directory)"),
    ],
)
def test_a_name_that_can_be_no_file(refusal, workdir, argument, message):
    (workdir / "there").write_text("")
    assert message in refusal(argument)
    assert [one.name for one in workdir.iterdir()] == ["there"]


@pytest.mark.parametrize("chars", [250, 254, 255])
def test_a_name_as_long_as_names_can_be(cli, workdir, chars):
    finished = cli(*SMALL, f"out={'a' * chars}", entry=prepare.main)
    assert finished.status == 0, finished.err
    assert [one.name for one in workdir.iterdir()] == ["a" * chars]


@pytest.mark.parametrize("flag", ["-m", "--multirun", "--multi", "hydra.mode=MULTIRUN"])
def test_multirun_is_refused(refusal, workdir, flag):
    assert "call prepare once for each file" in refusal("out=samples.jsonl", flag)
    assert not (workdir / "samples.jsonl").exists()


def test_multirun_over_lengths_is_refused_once(refusal, workdir):
    refusal("-m", "length=512,1024", "out=samples.jsonl")
    assert list(workdir.iterdir()) == []


@pytest.mark.parametrize("value", ["0", "-1", "16777217", str(10**30)])
def test_a_length_out_of_range(refusal, workdir, value):
    said = refusal(f"length={value}", "out=samples.jsonl")
    assert f"length={value}: out of range; must be an integer in 1 to 16777216." in said
    assert list(workdir.iterdir()) == []


@pytest.mark.parametrize("value", ["[512]", "[512,1024]", "[]"])
def test_one_file_holds_one_length(refusal, value):
    assert "one file holds one length" in refusal(f"length={value}", "out=samples.jsonl")


def test_an_older_file_is_replaced_whole(tmp_path):
    out = tmp_path / "deep" / "samples.jsonl"
    prepare.write_samples([sample(0), sample(1)], out)
    prepare.write_samples([sample(2)], out)
    assert [json.loads(line)["ordinal"] for line in out.read_text().splitlines()] == [2]
    assert list(out.parent.iterdir()) == [out]


def test_an_interrupted_write_leaves_the_older_file(tmp_path, monkeypatch):
    out = tmp_path / "samples.jsonl"
    prepare.write_samples([sample(0)], out)
    before = out.read_text()

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "sample_line", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare.write_samples([sample(1)], out)
    assert out.read_text() == before
    assert list(tmp_path.iterdir()) == [out]


def test_the_tokenizer_of_a_packaged_model_has_the_name_that_reports_print(cli, workdir):
    for words in (("out=default",), ("out=named", "tokenizer=package:probe")):
        assert cli(*SMALL, *words, entry=prepare.main).status == 0
    assert (workdir / "named").read_bytes() == (workdir / "default").read_bytes()

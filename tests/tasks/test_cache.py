"""The cache: what it serves, what it must never serve, and that nothing is tokenised twice."""

import dataclasses
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ruler_bench.tasks import DataSpec, Question, Sample, cache, generate, load_questions
from ruler_bench.tokenizer import FolderTokenizer

MakeSpec = Callable[..., DataSpec]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def load(spec: DataSpec, num_samples: int, folder: Path) -> list[Sample]:
    questions = load_questions(spec, spec.tokenizer, num_samples, folder)
    return [question.sample for question in questions]


def entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*/*") if path.is_dir())


def forbid_generating(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> list[Sample]:
        raise AssertionError("generated anew")

    monkeypatch.setattr(cache, "generate", refuse)


@pytest.mark.parametrize("task", ["niah_single_1", "niah_multiquery", "vt"])
def test_second_run_tokenises_nothing(
    spec: MakeSpec, folder: Path, make_word_tokenizer: Callable[[], Any], task: str
) -> None:
    data = spec(task)
    first = load_questions(data, data.tokenizer, 4, folder)
    tokenizer = make_word_tokenizer()
    again = load_questions(spec(task, tokenizer=tokenizer), tokenizer, 4, folder)
    assert again == first
    assert tokenizer.texts_counted == 0
    assert [one.sample for one in first] == generate(spec(task), 4)
    for one in first:
        assert one.prompt_token_ids == tuple(tokenizer.encode_prompt(one.sample.prompt))


def test_another_model_gets_tokens_of_its_own(
    spec: MakeSpec, folder: Path, smollm2: FolderTokenizer
) -> None:
    data = spec()
    words = load_questions(data, data.tokenizer, 2, folder)
    pieces = load_questions(data, smollm2, 2, folder)
    assert [one.sample for one in words] == [one.sample for one in pieces]
    for one in pieces:
        assert one.prompt_token_ids == tuple(smollm2.encode_prompt(one.sample.prompt))


def test_a_longer_run_serves_a_shorter_one(
    spec: MakeSpec, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer = load(spec(), 5, folder)
    forbid_generating(monkeypatch)
    assert load(spec(), 2, folder) == longer[:2]


def test_growing_keeps_the_earlier_samples_and_one_entry(spec: MakeSpec, folder: Path) -> None:
    shorter = load(spec(), 2, folder)
    assert load(spec(), 5, folder)[:2] == shorter
    assert [entry.name.partition("-")[0] for entry in entries(folder)] == ["5"]


def test_other_settings_have_their_own_entries(spec: MakeSpec, folder: Path) -> None:
    for data in (spec(), spec(seed=1), spec(template="Phi3")):
        assert load(data, 2, folder) == generate(data, 2)
    assert len(entries(folder)) == 3


def damage_data(entry: Path) -> None:
    file = next(entry.glob("*.arrow"))
    content = bytearray(file.read_bytes())
    place = content.index(b"The grass is green")
    content[place : place + 3] = b"Thy"
    file.write_bytes(content)


def truncate_data(entry: Path) -> None:
    file = next(entry.glob("*.arrow"))
    file.write_bytes(file.read_bytes()[:200])


def drop_note(entry: Path) -> None:
    (entry / cache.ENTRY_FILE).unlink()


def other_fingerprint(entry: Path) -> None:
    file = entry / cache.ENTRY_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), "fingerprint": "0" * 64}))


def no_object(entry: Path) -> None:
    (entry / cache.ENTRY_FILE).write_text("[1")


def empty_folder(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.mkdir()


@pytest.mark.parametrize(
    "damage",
    [damage_data, truncate_data, drop_note, other_fingerprint, no_object, empty_folder],
    ids=lambda damage: damage.__name__,
)
def test_damaged_and_stale_entries_are_never_used(
    spec: MakeSpec, folder: Path, damage: Callable[[Path], None]
) -> None:
    good = load(spec(), 3, folder)
    (entry,) = entries(folder)
    damage(entry)
    assert load(spec(), 3, folder) == good
    assert entry not in entries(folder)
    assert len(entries(folder)) == 1


def test_an_unfinished_entry_is_never_used(spec: MakeSpec, folder: Path) -> None:
    good = load(spec(), 3, folder)
    (entry,) = entries(folder)
    entry.rename(entry.with_name(f"draft-{entry.name}"))
    assert load(spec(), 3, folder) == good
    assert len(entries(folder)) == 2


def test_an_interrupted_write_leaves_no_entry(
    spec: MakeSpec, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(rows: list[Any], draft: Path) -> None:
        draft.mkdir(parents=True)
        (draft / "data.arrow").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(cache, "_save_rows", stop)
    with pytest.raises(KeyboardInterrupt):
        load(spec(), 2, folder)
    assert entries(folder) == []


def test_a_full_disk_costs_a_warning_only(
    spec: MakeSpec,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def no_space(rows: list[Any], draft: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "_save_rows", no_space)
    with caplog.at_level(logging.WARNING):
        assert load(spec(), 2, folder) == generate(spec(), 2)
    assert "No space left on device" in caplog.text


def test_a_sample_without_a_place_survives(spec: MakeSpec, tmp_path: Path) -> None:
    sample = generate(spec(), 1)[0]
    bare = dataclasses.replace(sample, depth=None, answer_offset=None, answer_token_position=None)
    question = Question(bare, (1, 2))
    cache._write(tmp_path / "entry", "f" * 64, [question])
    (entry,) = entries(tmp_path)
    assert cache._read(entry, "f" * 64) == [question]


LOAD = """
import dataclasses, json, sys
from pathlib import Path
from ruler_bench.tasks import DataSpec, load_questions, make_task
from ruler_bench.tokenizer import load_tokenizer
task, tokenizer, folder = json.loads(sys.argv[1])
spec = DataSpec(make_task(task), 1024, 42, "base", load_tokenizer(tokenizer))
print("ready", flush=True)
sys.stdin.readline()
questions = load_questions(spec, spec.tokenizer, 3, Path(folder))
print(json.dumps([question.sample.prompt for question in questions]))
"""


def test_two_processes_at_once_get_the_same(
    spec: MakeSpec, folder: Path, smollm2: FolderTokenizer
) -> None:
    data = spec(length=1024, tokenizer=smollm2)
    arguments = json.dumps([dataclasses.asdict(data.task), smollm2.name, str(folder)])
    with subprocess.Popen(
        [sys.executable, "-c", LOAD, arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent.parent,
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("go\n")
        process.stdin.flush()
        prompts = [sample.prompt for sample in load(data, 3, folder)]
        assert json.loads(process.communicate(timeout=120)[0]) == prompts
    assert prompts == [sample.prompt for sample in generate(data, 3)]
    assert [sample.prompt for sample in load(data, 3, folder)] == prompts
    assert all(entry.name.startswith("3-") for entry in entries(folder))

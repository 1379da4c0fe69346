"""Checkpoints on disk: what they hold, what survives, and what is refused."""

import hashlib
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from backends.base import ConfigurationError, RequestError
from backends.engine import checkpoint
from backends.engine.checkpoint import CheckpointWriter

SETTINGS = {"chunk_tokens": 4, "policy": {"name": "full"}, "shape": (1, 2)}
PROMPT = (5, 6, 7)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "deep" / "run"


def recorded(folder, request_id=0, *, tensors=False, prompt=PROMPT, settings=SETTINGS, rows=None):
    """Record one request with one record, by an engine of its own."""
    writer = CheckpointWriter(folder, tensors=tensors)
    writer.begin(request_id, prompt, settings)
    writer.record("hidden", 2, 1, 4, torch.ones(3, 2) if rows is None else rows)
    writer.end()


def lines(folder, request_id=0):
    return [json.loads(line) for line in _index(folder, request_id).read_text().splitlines()]


def _index(folder, request_id=0):
    return folder / f"request_{request_id:06d}.jsonl"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("size", [(5,), (5, 3), (5, 2, 4)])
def test_a_digest_a_row_and_the_rows_themselves(folder, dtype, size):
    rows = torch.randn(*size).mul(100).to(dtype)
    recorded(folder, 7, tensors=True, rows=rows)
    first, line, last = lines(folder, 7)
    assert first == {"request_id": 7, "prompt_token_ids": list(PROMPT)}
    assert last == {"records": 1}
    assert line == {
        "name": "hidden",
        "layer": 2,
        "chunk": 1,
        "start": 4,
        "shape": list(size),
        "dtype": str(dtype).removeprefix("torch."),
        "first_digest": 0,
        "tensor": "request_000007/000000.safetensors",
    }
    raw = (folder / "request_000007.digests").read_bytes()
    for place in range(5):
        row = bytes(rows[place].reshape(-1).view(torch.uint8).tolist())
        assert raw[8 * place : 8 * place + 8] == hashlib.blake2b(row, digest_size=8).digest()
    assert torch.equal(load_file(folder / line["tensor"])["rows"], rows)


def test_rows_that_are_a_view_are_recorded_as_they_read(folder):
    whole = torch.arange(24.0).reshape(4, 6)
    writer = CheckpointWriter(folder, tensors=True)
    writer.begin(0, PROMPT, SETTINGS)
    writer.record("query", 0, 0, 0, whole.T)
    writer.record("query", 0, 0, 6, whole[1:, ::2])
    writer.record("query", 0, 0, 9, whole[:0])
    writer.record("query", 0, 0, 9, whole.T.contiguous())
    writer.end()
    _, first, second, third, last = lines(folder)
    assert last == {"records": 3}
    assert [line["first_digest"] for line in (first, second, third)] == [0, 6, 9]
    raw = (folder / "request_000000.digests").read_bytes()
    assert raw[:48] == raw[72:]
    assert torch.equal(load_file(folder / second["tensor"])["rows"], whole[1:, ::2])


def test_under_inference_mode_and_with_gradients(folder):
    weight = torch.ones(3, 2, requires_grad=True)
    recorded(folder, 0, rows=weight * 2)
    with torch.inference_mode():
        recorded(folder, 1, rows=torch.full((3, 2), 2.0))
    digests = [(folder / f"request_00000{one}.digests").read_bytes() for one in (0, 1)]
    assert digests[0] == digests[1]


CRASH = """
import os, signal, sys, torch
from pathlib import Path
from backends.engine.checkpoint import CheckpointWriter
writer = CheckpointWriter(Path(sys.argv[1]), tensors=True)
writer.begin(0, (1, 2), {})
for layer in range(3):
    writer.record("key", layer, 0, 0, torch.ones(4, 2))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_every_record(folder):
    subprocess.run([sys.executable, "-c", CRASH, str(folder)], check=False)
    first, *records = lines(folder)
    assert first["prompt_token_ids"] == [1, 2]
    assert [line["layer"] for line in records] == [0, 1, 2]
    assert (folder / "request_000000.digests").stat().st_size == 3 * 4 * 8
    assert all((folder / line["tensor"]).exists() for line in records)


def test_a_request_that_was_not_ended_ends_with_the_next(folder):
    writer = CheckpointWriter(folder, tensors=False)
    writer.begin(0, PROMPT, SETTINGS)
    writer.record("value", 0, 0, 0, torch.ones(1, 2))
    writer.begin(1, PROMPT, SETTINGS)
    writer.end()
    writer.end()
    assert lines(folder, 0)[-1] == {"records": 1}
    assert lines(folder, 1)[-1] == {"records": 0}


def test_a_later_engine_goes_on_in_the_folder_and_records_a_request_anew(folder):
    recorded(folder, 0, tensors=True)
    recorded(folder, 1, tensors=True)
    recorded(folder, 0, tensors=True, rows=torch.zeros(1, 2))
    assert lines(folder, 0)[1]["shape"] == [1, 2]
    assert (folder / "request_000000.digests").stat().st_size == 8
    assert len(list((folder / "request_000000").iterdir())) == 1
    assert lines(folder, 1)[1]["shape"] == [3, 2]


def one_line(error):
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"settings": SETTINGS | {"chunk_tokens": 8}}, "chunk_tokens=4, not 8"),
        ({"settings": {"chunk_tokens": 4}}, 'policy={"name": "full"}, not null'),
        ({"tensors": True}, "checkpoint_tensors=false, not true"),
        ({"prompt": (5, 6)}, "request_000000.jsonl holds another prompt"),
    ],
)
def test_what_belongs_to_another_run_is_refused_and_left_alone(folder, change, said):
    recorded(folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ConfigurationError) as error:
        recorded(folder, **change)
    assert said in one_line(error)
    assert f"backend.checkpoint={folder}" in one_line(error)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def a_file(folder):
    folder.parent.mkdir()
    folder.write_text("")


def a_folder_of_something_else(folder):
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("")


def a_later_version(folder):
    folder.mkdir(parents=True)
    (folder / checkpoint.MANIFEST).write_text('{"format": "ruler_bench checkpoint"}')


def no_json(folder):
    folder.mkdir(parents=True)
    (folder / checkpoint.MANIFEST).write_text("[1")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (a_file, "cannot be used (File exists)"),
        (a_folder_of_something_else, "holds other files and no checkpoint.json"),
        (a_later_version, "not of format version 1"),
        (no_json, "not of format version 1"),
    ],
)
def test_a_folder_that_cannot_be_used(folder, make, said):
    make(folder)
    with pytest.raises(ConfigurationError) as error:
        CheckpointWriter(folder, tensors=False)
    assert said in one_line(error)


def test_a_full_disk_fails_the_request_and_no_later_one(folder, monkeypatch):
    writer = CheckpointWriter(folder, tensors=False)
    writer.begin(0, PROMPT, SETTINGS)

    def full(*_):
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "row_digests", full)
        with pytest.raises(RequestError) as error:
            writer.record("key", 0, 0, 0, torch.ones(1, 2))
    assert "request 0" in one_line(error)
    assert "No space left on device" in one_line(error)
    writer.end()
    writer.begin(1, PROMPT, SETTINGS)
    writer.record("key", 0, 0, 0, torch.ones(1, 2))
    writer.end()
    assert lines(folder, 1)[-1] == {"records": 1}


def test_slips_of_the_caller(folder):
    writer = CheckpointWriter(folder, tensors=False)
    with pytest.raises(AssertionError, match="outside"):
        writer.record("key", 0, 0, 0, torch.ones(1, 2))
    writer.begin(0, PROMPT, SETTINGS)
    with pytest.raises(AssertionError, match="'keys'"):
        writer.record("keys", 0, 0, 0, torch.ones(1, 2))

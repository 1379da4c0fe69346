"""Model folders as people have them: what is wrong is said in one line that names the file."""

import json
from pathlib import Path
from typing import Any

import pytest

from ruler_bench.errors import UsageError
from ruler_bench.model_files import (
    fingerprint,
    max_positions,
    model_folder,
    read_json,
    stop_token_ids,
    vocabulary_size,
)

NAMES = ("generation_config.json", "config.json")


def write(folder: Path, name: str = "config.json", **values: Any) -> Path:
    (folder / name).write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    ("generation", "model", "expected"),
    [
        (7, 3, (7,)),
        ([7, 0], 3, (7, 0)),
        (None, [3], (3,)),
        (None, None, ()),
    ],
)
def test_stop_token_ids(tmp_path: Path, generation: Any, model: Any, expected: Any) -> None:
    write(tmp_path, "generation_config.json", eos_token_id=generation)
    write(tmp_path, "config.json", eos_token_id=model)
    assert stop_token_ids(tmp_path) == expected


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [["x"], [[1]], True, [True], "x", "7", {}, -1, [2, -1], 1.0])
def test_what_is_no_stop_token_id_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    write(tmp_path, name, eos_token_id=value)
    with pytest.raises(UsageError, match=r"eos_token_id=.* is wrong; write a token id") as caught:
        stop_token_ids(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / name}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "read"), [("vocab_size", vocabulary_size), ("max_position_embeddings", max_positions)]
)
def test_sizes(tmp_path: Path, key: str, read: Any) -> None:
    assert read(write(tmp_path, **{key: 512})) == 512
    assert read(write(tmp_path, **{key: None})) is None
    assert read(write(tmp_path)) is None
    for value in (True, False, 0, -1, "512", [512], 512.0, {}):
        write(tmp_path, **{key: value})
        with pytest.raises(UsageError, match=rf"config\.json: {key}=.* is wrong") as caught:
            read(tmp_path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b"3", b"", b"\xff\xfe", b"[" * 100_000], ids=lambda one: repr(one[:4])
)
def test_what_is_no_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UsageError, match=r"config\.json .*correct it") as caught:
        read_json(tmp_path / "config.json")
    assert "\n" not in str(caught.value)


def test_a_fingerprint_follows_the_weights(tmp_path: Path) -> None:
    write(tmp_path)
    weights = tmp_path / "model.safetensors"
    seen = {fingerprint(tmp_path)}
    for content in (b"", b"one", b"two"):
        weights.write_bytes(content)
        seen.add(fingerprint(tmp_path))
    assert len(seen) == 4
    weights.rename(tmp_path / "blob")
    weights.symlink_to(tmp_path / "blob")
    assert fingerprint(tmp_path) in seen


def a_folder(path: Path) -> None:
    path.mkdir()


def a_link_to_nothing(path: Path) -> None:
    path.symlink_to(path.parent / "gone")


def a_link_to_itself(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("make", [a_folder, a_link_to_nothing, a_link_to_itself])
@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors", "m.bin"])
def test_weights_that_are_no_file_are_refused(tmp_path: Path, make: Any, name: str) -> None:
    make(tmp_path / name)
    with pytest.raises(UsageError, match="put the model's weights there, or remove it") as caught:
        fingerprint(tmp_path)
    assert str(caught.value).startswith(str(tmp_path / name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a" * 5000, "~no-such-user-anywhere/model"])
def test_a_name_that_cannot_be_looked_up(name: str) -> None:
    with pytest.raises(UsageError, match=r"cannot be looked up .*name a folder") as caught:
        model_folder(name)
    assert "\n" not in str(caught.value)

"""What the harness itself must know of a model's folder; needs neither torch nor transformers."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from ruler_bench.config import PACKAGED_PREFIX
from ruler_bench.errors import UsageError, unknown_name
from ruler_bench.pretrained import PRETRAINED, pretrained_folder

ASSETS = Path(__file__).parent / "assets"
WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.gguf")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HASHED_EDGE_BYTES = 1 << 20


def model_folder(path: str) -> Path:
    """Return the local folder of a model: packaged, the user's, or a hub's snapshot.

    Args:
        path: `package:NAME`, a folder, or a hub name such as `org/model`.

    Raises:
        UsageError: there is no such folder, the hub cannot be reached or has no such model, or a
            package that brings a model is missing.
    """
    if path.startswith(PACKAGED_PREFIX):
        return _packaged(path.removeprefix(PACKAGED_PREFIX))
    try:
        folder = Path(path).expanduser()
        is_folder = folder.is_dir()
    except (OSError, RuntimeError) as error:  # too long a name, or ~ of an unknown user
        raise UsageError(
            f"model.path={path}: cannot be looked up ({_first_line(error)}); name a folder or a "
            "hub name such as org/model."
        ) from error
    if is_folder:
        _check_model_folder(folder)
        return folder
    if folder.exists():
        raise UsageError(f"model.path={path}: is a file; name the folder that holds config.json.")
    if not _HUB_NAME.fullmatch(path):
        raise UsageError(
            f"model.path={path}: there is no such folder; name a folder with config.json, "
            "weights and tokenizer, or a hub name such as org/model."
        )
    return _hub_snapshot(path)


def _packaged(name: str) -> Path:
    if name in PRETRAINED:
        return pretrained_folder(name)
    names = [one.name for one in ASSETS.iterdir() if one.is_dir()] if ASSETS.is_dir() else []
    if name not in names:
        raise unknown_name("packaged model", name, [*names, *PRETRAINED])
    return ASSETS / name


def _check_model_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise UsageError(f"model.path={folder}: holds no config.json, so it is no model folder.")


def _hub_snapshot(name: str) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 (only for hub names)

    try:
        return Path(snapshot_download(name, ignore_patterns=["*.pth", "*.onnx", "original/*"]))
    except Exception as error:
        # The hub's client raises many types, all of which mean one thing to a user.
        raise UsageError(
            f"model.path={name}: there is no such folder here, and the hub gave no such model "
            f"({type(error).__name__}: {_first_line(error)}). Name a local folder, or check the "
            "name and the network."
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object from a model folder.

    Raises:
        UsageError: the file holds something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} is no JSON file ({_first_line(error)}); correct it or copy the model anew."
        ) from error
    if not isinstance(values, dict):
        raise UsageError(f"{path} holds no JSON object; correct it or copy the model anew.")
    return values


def stop_token_ids(folder: Path) -> tuple[int, ...]:
    """Return the end-of-text ids: those of generation_config.json, else of config.json.

    Raises:
        UsageError: eos_token_id is neither a token id nor a list of them.
    """
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            found = read_json(folder / name).get("eos_token_id")
            if found is not None:
                return _token_ids(folder / name, found)
    return ()


def _token_ids(path: Path, found: Any) -> tuple[int, ...]:
    ids = found if isinstance(found, list) else [found]
    if not all(type(one) is int and one >= 0 for one in ids):  # a bool is an int too
        raise UsageError(
            f"{path}: eos_token_id={json.dumps(found)} is wrong; write a token id (an integer from "
            "0), a list of token ids, or null."
        )
    return tuple(ids)


def max_positions(folder: Path) -> int | None:
    """Return max_position_embeddings, or None where the config does not say.

    Raises:
        UsageError: it is no integer from 1.
    """
    return _size(folder / "config.json", "max_position_embeddings")


def vocabulary_size(folder: Path) -> int | None:
    """Return vocab_size, or None where the config does not say.

    Raises:
        UsageError: it is no integer from 1.
    """
    return _size(folder / "config.json", "vocab_size")


def _size(path: Path, key: str) -> int | None:
    found = read_json(path).get(key)
    if found is None or (type(found) is int and found >= 1):  # a bool is an int too
        return found
    raise UsageError(
        f"{path}: {key}={json.dumps(found)} is wrong; write an integer of at least 1, or leave "
        "the key out."
    )


def fingerprint(folder: Path) -> str:
    """Return a hash that changes when the model does, without reading gigabytes.

    Covers the configuration, and of each weights file its name, size, first and last MiB.

    Raises:
        UsageError: what is named like a weights file cannot be read as one.
    """
    digest = hashlib.sha256()
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            digest.update((folder / name).read_bytes())
    for path in sorted(one for pattern in WEIGHT_PATTERNS for one in folder.glob(pattern)):
        _hash_edges(digest, path)
    return digest.hexdigest()[:16]


def _hash_edges(digest: hashlib._Hash, path: Path) -> None:
    if not path.is_file():
        what = "a link to nothing" if not path.exists() else "no regular file"
        raise UsageError(f"{path} is {what}; put the model's weights there, or remove it.")
    try:
        digest.update(f"{path.name}:{path.stat().st_size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HASHED_EDGE_BYTES))
            file.seek(max(0, path.stat().st_size - _HASHED_EDGE_BYTES))
            digest.update(file.read())
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read ({error.strerror}); make it readable, or remove it."
        ) from error

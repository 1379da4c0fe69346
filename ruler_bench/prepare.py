"""`python -m ruler_bench.prepare`: write the samples of a task to a JSON-lines file."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from backends.base import ConfigurationError
from ruler_bench.cli import (
    JobResult,
    asks_for_multirun,
    choices_and_overrides,
    print_error,
    run_app,
)
from ruler_bench.command_line import USAGE_ERROR
from ruler_bench.config import (
    PACKAGED_PREFIX,
    PrepareConfig,
    chat_of,
    check_data_keys,
    check_keys,
    task_spec,
    tokenizer_name,
)
from ruler_bench.errors import UsageError
from ruler_bench.folders import folder_of
from ruler_bench.tasks import DataSpec, generate
from ruler_bench.tasks.sample import Sample
from ruler_bench.unread import unread_output
from ruler_bench.values import MAX_LENGTH, check_int


@unread_output()
def main() -> int:
    """Run the command line in sys.argv and return the exit status."""
    try:
        if any(asks_for_multirun(argument) for argument in sys.argv[1:]):
            raise _no_multirun()
        results = run_app("prepare", job)
    except ConfigurationError as error:
        print_error(error)
        return USAGE_ERROR
    return max((result.status for result in results), default=0)


def job(config: DictConfig) -> JobResult:
    """Write the samples that one composed configuration names."""
    from ruler_bench.model_files import model_folder  # noqa: PLC0415
    from ruler_bench.tokenizer import load_tokenizer  # noqa: PLC0415

    if choices_and_overrides()[2] is not None:  # by hydra.mode, which is no flag
        raise _no_multirun()
    check_keys(config, PrepareConfig)
    check_data_keys(config)
    if OmegaConf.is_missing(config, "out"):
        raise UsageError("out is missing: name the file to write, for instance out=samples.jsonl.")
    out = _writable(config.out)
    if OmegaConf.is_list(config.length):
        raise UsageError(f"length={config.length}: one file holds one length; name one.")
    check_int("length", config.length, 1, MAX_LENGTH)
    name = tokenizer_name(config)
    if config.tokenizer is None or name.startswith(PACKAGED_PREFIX):
        name = str(model_folder(name))
    spec = DataSpec(
        task=task_spec(config),
        length=config.length,
        seed=config.seed,
        template=config.template,
        tokenizer=load_tokenizer(name, chat_of(config)),
        qa_data=folder_of(config.qa_data),
        data=folder_of(config.data),
    )
    write_samples(generate(spec, config.num_samples), out)
    print(f"{out}: {config.num_samples} samples of {spec.task.name}", file=sys.stderr)
    return JobResult(0)


def _no_multirun() -> UsageError:
    return UsageError(
        "-m/--multirun: prepare writes one file; leave it out and call prepare once for each file."
    )


def _writable(out: str) -> Path:
    """Return `out` as the path of a file that is there already or may be made.

    Raises:
        UsageError: it can name no file, or something else is there: a folder, a device, a pipe or
            a link, which the new file would take the place of.
    """
    path = Path(out)
    if not out.strip():
        raise UsageError("out is empty: name the file to write, for instance out=samples.jsonl.")
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        mode = stat.S_IFDIR if out.endswith("/") else stat.S_IFREG  # what it is to become
    except OSError as error:
        raise _not_written(path, error) from error
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link"}
        what = kinds.get(stat.S_IFMT(mode), "no regular file")
        raise UsageError(f"out={out}: is {what}; name a regular file, or one that is not there.")
    return path


def _not_written(path: Path, error: OSError) -> UsageError:
    return UsageError(f"out={path}: cannot be written ({error.strerror}); name another file.")


def sample_line(sample: Sample) -> str:
    """Return one sample as a line of JSON, newline included."""
    values = {
        "ordinal": sample.ordinal,
        "input": sample.input,
        "answer_prefix": sample.answer_prefix,
        "outputs": sample.outputs,
        "length": sample.length,
        "depth": sample.depth,
        "answer_offset": sample.answer_offset,
        "answer_token_position": sample.answer_token_position,
    }
    return json.dumps(values, ensure_ascii=True) + "\n"


def write_samples(samples: list[Sample], path: Path) -> None:
    """Write the samples; the file appears whole or not at all.

    Raises:
        UsageError: the file cannot be written.
    """
    path = _writable(str(path))
    # A short name of its own: that of `path` may be as long as names can be.
    part = path.with_name(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("w") as file:
            file.writelines(sample_line(sample) for sample in samples)
        part.replace(path)
    except OSError as error:
        raise _not_written(path, error) from error
    finally:
        with contextlib.suppress(OSError):  # it is gone where all went well
            part.unlink()


if __name__ == "__main__":
    sys.exit(main())

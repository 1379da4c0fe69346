"""`python -m ruler_bench.prepare`: write the samples of a task to a JSON-lines file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from backends.base import ConfigurationError
from ruler_bench.cli import USAGE_ERROR, JobResult, print_error, run_app
from ruler_bench.config import (
    PrepareConfig,
    check_data_keys,
    check_keys,
    parse_lengths,
    task_spec,
    tokenizer_name,
)
from ruler_bench.errors import UsageError
from ruler_bench.tasks import DataSpec, generate
from ruler_bench.tasks.sample import Sample


def main() -> int:
    """Run the command line in sys.argv and return the exit status."""
    try:
        results = run_app("prepare", job)
    except ConfigurationError as error:
        print_error(error)
        return USAGE_ERROR
    return max((result.status for result in results), default=0)


def job(config: DictConfig) -> JobResult:
    """Write the samples that one composed configuration names."""
    from ruler_bench.model_files import model_folder  # noqa: PLC0415
    from ruler_bench.tokenizer import load_tokenizer  # noqa: PLC0415

    check_keys(config, PrepareConfig)
    check_data_keys(config)
    if OmegaConf.is_missing(config, "out"):
        raise UsageError("out is missing: name the file to write, for instance out=samples.jsonl.")
    lengths = parse_lengths(config.length)
    if len(lengths) > 1:
        raise UsageError("length: one file holds one length; name one.")
    name = config.tokenizer or str(model_folder(tokenizer_name(config)))
    spec = DataSpec(
        task=task_spec(config),
        length=lengths[0],
        seed=config.seed,
        template=config.template,
        tokenizer=load_tokenizer(name),
    )
    write_samples(generate(spec, config.num_samples), Path(config.out))
    print(f"{config.out}: {config.num_samples} samples of {spec.task.name}", file=sys.stderr)
    return JobResult(0)


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
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("w") as file:
            file.writelines(sample_line(sample) for sample in samples)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UsageError(f"out={path}: cannot be written ({error.strerror}).") from error


if __name__ == "__main__":
    sys.exit(main())

r"""Measure sparse prefill: attention alone, the choice of blocks, whole prompts, offload.

    python scripts/bench_sparse.py --out DIR
    python scripts/bench_sparse.py --out DIR --lengths 131072 --only attention,estimation
    python scripts/bench_sparse.py --render DIR
    python scripts/bench_sparse.py --out DIR --shape tiny --device cpu --lengths 512

In one process, in the shape of a model. Attention alone runs on random blocks through the kernel
that the engine uses, beside every dense kernel that it has; the choice of blocks and whole prompts
run on random weights whose keys have sinks, a local band and strong columns, of a strength that is
looked for first (--strength names one instead). What is measured is compared with float64 before.
Each row is on disk as soon as it is measured; the same command goes on where it was stopped.
docs/gpu_benchmarks.md explains the table. Exit status: 0 all rows measured, 1 some failed (see
table.md and errors.log), 2 something is missing or wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # `scripts`, `ruler_bench` and `backends`, wherever this is run from

import torch  # noqa: E402

from backends.base import ConfigurationError  # noqa: E402
from backends.engine.attention import KERNELS, Kernel  # noqa: E402
from backends.engine.settings import resolve_dtype  # noqa: E402
from ruler_bench.errors import UsageError, one_line, unknown_name  # noqa: E402
from scripts.bench import ceilings, sparse_attention, sparse_prefill, structured  # noqa: E402
from scripts.bench.ceilings import Bench  # noqa: E402
from scripts.bench.journal import (  # noqa: E402
    TABLE,
    Journal,
    command_line,
    environment,
    gpu_state,
    read_manifest,
    read_rows,
)
from scripts.bench.prompt import DESCRIPTION, prompt_maker  # noqa: E402
from scripts.bench.rows import (  # noqa: E402
    DONE,
    DTYPES,
    FAILED,
    INTERRUPTED,
    SUSTAINED_SECONDS,
    WRONG,
    Task,
    find_device,
    known_names,
    prompt_lengths,
    require_least,
    run,
    tell,
)
from scripts.bench.shapes import SHAPES  # noqa: E402
from scripts.bench.sparse_prefill import SUBJECTS, XATTENTION, Plan  # noqa: E402
from scripts.bench.sparse_table import render  # noqa: E402
from scripts.bench.structured import FirstLayer, StructuredWeights  # noqa: E402
from scripts.bench.timing import Stopwatch  # noqa: E402

PERCENTS = (5, 10, 20, 40, 100)
ATTENTION, CALIBRATION, ESTIMATION, PREFILL = "attention", "calibration", "estimation", "prefill"
PARTS = (ATTENTION, CALIBRATION, ESTIMATION, PREFILL)


def main(arguments: list[str] | None = None) -> int:
    """Measure or render; returns the exit status."""
    options = parse(arguments)
    try:
        if options.render is not None:
            print(write_table(options.render))
            return DONE
        return measure(options, command_line("bench_sparse.py", arguments))
    except ConfigurationError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return WRONG


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, metavar="DIR", help="folder for rows.jsonl, manifest.json, table.md")
    add("--render", type=Path, metavar="DIR", help="make table.md anew from rows.jsonl, and stop")
    add("--shape", default="llama-3.1-8b", help=f"of the model: {', '.join(SHAPES)}")
    add("--lengths", metavar="N,N", help="prompt tokens (default: those of the shape)")
    add("--only", metavar="PART,PART", help=f"of {', '.join(PARTS)}")
    add("--subjects", metavar="NAME,NAME",
        help=f"of the whole prompts: {', '.join(one.name for one in SUBJECTS)}")  # fmt: skip
    add("--kernels", metavar="NAME,NAME", help="dense kernels (default: all that can run)")
    add("--device", default="cuda", help="cuda, cuda:N; or cpu, with --shape tiny")
    add("--dtype", default="auto", help="auto is bfloat16 on a GPU and float32 on a CPU")
    add("--repeats", type=int, default=2, help="measured prefills of an engine; the median counts")
    add("--threshold", type=float, default=0.9, help="of XAttention")
    add("--density", type=float, default=0.1, help="share of the blocks that it is to keep")
    add("--strength", type=float, help="of the keys' structure, instead of looking for it")
    add("--seed", type=int, default=0, help="of the random weights")
    add("--threads", type=int, default=1, help="of the CPU")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace, command: str) -> int:
    """Measure every row asked for that the folder does not hold yet, and print the table.

    Raises:
        ConfigurationError: an option is wrong, or the folder is of other settings.
    """
    check_options(options)
    shape = SHAPES[options.shape]
    device = find_device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dtype = resolve_dtype(options.dtype, device)
    torch.set_num_threads(options.threads)
    bench = Bench(shape, device, dtype, Stopwatch(device, SUSTAINED_SECONDS[device.type]))
    settings = {
        "shape": shape.name,
        "dtype": str(dtype).removeprefix("torch."),
        "seed": options.seed,
        "threads": options.threads,
        "threshold": options.threshold,
        "density": options.density,
        "prompt": DESCRIPTION,
        "keys": structured.DESCRIPTION,
    }
    measurements = Measurements(options, bench)
    facts = {"gpu_state": gpu_state(device), "kernels_left_out": measurements.kernels_left_out}
    journal = Journal(options.out, settings | environment(device), command, facts)
    failed = 0
    try:
        for task in measurements.tasks():
            if journal.has(task.key):
                tell(f"{task.key}: is there already")
            else:
                failed += not run(task, journal, device)
    except KeyboardInterrupt:
        tell("interrupted; the same command goes on from here")
        return INTERRUPTED
    finally:
        table = write_table(options.out)
    print(table)
    return FAILED if failed else DONE


def write_table(folder: Path) -> str:
    """Make table.md from the folder's rows, and return it.

    Raises:
        UsageError: the folder holds no rows, or damaged ones.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise UsageError(f"{folder} holds no manifest.json: name a folder made by --out.")
    text = render(manifest, read_rows(folder))
    (folder / TABLE).write_text(text, encoding="utf-8")
    return text


def check_options(options: argparse.Namespace) -> None:
    """Check the options, and turn lists of names into tuples.

    Raises:
        UsageError: one is missing, out of range or unknown.
    """
    if options.out is None:
        raise UsageError("--out is missing: name the folder for rows.jsonl and the table.")
    if options.shape not in SHAPES:
        raise unknown_name("--shape", options.shape, SHAPES)
    if options.dtype not in DTYPES:
        raise unknown_name("--dtype", options.dtype, DTYPES)
    for option, least in (("repeats", 1), ("threads", 1), ("seed", 0), ("strength", 0.01)):
        require_least(option, getattr(options, option), least)
    for option in ("threshold", "density"):
        value = getattr(options, option)
        if not 0 < value < 1:
            raise UsageError(f"--{option}={value}: must be a share, above 0 and below 1.")
    options.lengths = prompt_lengths(options.lengths, SHAPES[options.shape], 1)
    options.only = PARTS if options.only is None else known_names("--only", options.only, PARTS)
    names = [one.name for one in SUBJECTS]
    if options.subjects is not None:
        names = list(known_names("--subjects", options.subjects, names))
    options.subjects = [one for one in SUBJECTS if one.name in names]


class Measurements:
    """What is measured, in order.

    Args:
        options: checked.
        bench: shape, device, number type, clock.

    Raises:
        ConfigurationError: a kernel that --kernels names cannot run here.
    """

    def __init__(self, options: argparse.Namespace, bench: Bench) -> None:
        self._options, self._bench = options, bench
        self.kernels_left_out: dict[str, str] = {}
        self._kernels: dict[str, Kernel] = {}
        if options.kernels is not None:
            names = known_names("--kernels", options.kernels, tuple(KERNELS))
            self._kernels = {name: ceilings.named_kernel(bench, name) for name in names}
        elif ATTENTION in options.only:
            self._kernels, self.kernels_left_out = ceilings.attention_kernels(bench)
        text = prompt_maker()
        strong_ids = structured.strong_ids(bench.shape, text(bench.shape.max_tokens))
        self._plan = Plan(
            make_weights=lambda strength: StructuredWeights(
                bench.shape,
                bench.device,
                bench.dtype,
                options.seed,
                strength=strength,
                strong_ids=strong_ids,
            ),
            make_prompt=structured.with_columns(text, strong_ids),
            repeats=options.repeats,
            threshold=options.threshold,
            threads=options.threads,
        )

    def tasks(self) -> Iterator[Task]:
        """Yield the rows to measure: attention alone, then what needs structured keys.

        The longest prompts come first: theirs are the figures that decide.
        """
        only, lengths = self._options.only, self._options.lengths[::-1]
        if ATTENTION in only:
            for tokens in lengths:
                yield from self._attention(tokens)
        if set(only) == {ATTENTION}:
            return
        if self._options.strength is None:
            yield self._calibration()
        for tokens in lengths:
            if ESTIMATION in only:
                yield from self._estimation(tokens)
            if PREFILL in only:
                yield from self._prefill(tokens)

    def _attention(self, tokens: int) -> Iterator[Task]:
        alone = sparse_attention.Alone(self._bench, tokens)
        for name, kernel in self._kernels.items():
            if not ceilings.is_out_of_reach(self._bench, name, tokens, tokens):
                yield Task(
                    f"attention {name}, {tokens} tokens",
                    ATTENTION,
                    name,
                    tokens,
                    {"kernel": name},
                    partial(alone.dense, kernel),
                )
        for percent in PERCENTS:
            yield Task(
                f"attention to {percent} percent, {tokens} tokens",
                ATTENTION,
                "blocks",
                tokens,
                {"percent": percent},
                partial(alone.sparse, percent / 100),
            )
        alone.release()

    def _calibration(self) -> Task:
        tokens, stride = max(self._options.lengths), min(XATTENTION)
        settings = {"wanted": self._options.density, "stride": stride}

        def calibrate() -> dict[str, Any]:
            return sparse_prefill.calibrate(
                self._bench, self._plan, tokens, stride, self._options.density
            )

        return Task(CALIBRATION, CALIBRATION, CALIBRATION, tokens, settings, calibrate)

    def _strength(self) -> float:
        """Return the strength that was named or found.

        Raises:
            UsageError: none was found.
        """
        if self._options.strength is not None:
            return float(self._options.strength)
        row = read_rows(self._options.out).get(CALIBRATION)
        if row is None or row["error"] is not None:
            raise UsageError("no strength was found: name one by --strength.")
        return float(row["figures"]["strength"])

    def _estimation(self, tokens: int) -> Iterator[Task]:
        @cache
        def layer() -> FirstLayer:
            weights = self._plan.make_weights(self._strength())
            return structured.first_layer(
                weights, self._bench.shape, self._plan.make_prompt(tokens)
            )

        def estimate(stride: int) -> dict[str, Any]:
            threshold = self._options.threshold
            figures = sparse_attention.estimation(self._bench, layer(), stride, threshold)
            return figures | {"strength": self._strength()}

        for stride in XATTENTION:
            yield Task(
                f"estimation at stride {stride}, {tokens} tokens{self._named()}",
                ESTIMATION,
                ESTIMATION,
                tokens,
                {"stride": stride},
                partial(estimate, stride),
            )
        layer.cache_clear()

    def _prefill(self, tokens: int) -> Iterator[Task]:
        def prefill(subject: sparse_prefill.Subject) -> dict[str, Any]:
            strength = self._strength()
            figures = sparse_prefill.measure(subject, self._bench, self._plan, strength, tokens)
            return figures | {"strength": strength}

        for subject in self._options.subjects:
            yield Task(
                f"{subject.name}, {tokens} tokens{self._named()}",
                "prompt",
                subject.name,
                tokens,
                self._plan.settings_of(subject, self._bench.shape)
                | {"repeats": self._plan.repeats},
                partial(prefill, subject),
            )

    def _named(self) -> str:
        """Return what tells rows of a strength that was named from those of the one found."""
        strength = self._options.strength
        return "" if strength is None else f", strength {strength:g}"


if __name__ == "__main__":
    gc.freeze()  # the modules' own objects need not be looked through between rows
    sys.exit(main())

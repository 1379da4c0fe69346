r"""Measure our engine and transformers side by side, and this machine's limits: one table.

    python scripts/bench_engine.py --out DIR
    python scripts/bench_engine.py --out DIR --lengths 32768 --only gpu_only,transformers
    python scripts/bench_engine.py --out DIR --lengths 524288 --device-memory-gb 24 \
        --new-tokens 5 --repeats 1
    python scripts/bench_engine.py --render DIR

Random weights in the shape of a model, the same for all, in one process. Each row is on disk as
soon as it is measured; the same command goes on where it was stopped. docs/gpu_benchmarks.md says
what is measured and how each limit is worked out. Exit status: 0 all rows measured, 1 some failed
(see table.md and errors.log), 2 something is missing or wrong.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # `scripts`, `ruler_bench` and `backends`, wherever this is run from

import torch  # noqa: E402

from backends.base import ConfigurationError  # noqa: E402
from backends.engine.attention import KERNELS, Kernel  # noqa: E402
from backends.engine.settings import resolve_dtype  # noqa: E402
from ruler_bench.errors import UsageError, one_line, unknown_name  # noqa: E402
from scripts.bench import ceilings, subjects  # noqa: E402
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
from scripts.bench.shapes import SHAPES, ChunkedSettings, RandomWeights, Shape  # noqa: E402
from scripts.bench.subjects import CHUNKED, SUBJECTS, Plan  # noqa: E402
from scripts.bench.table import render  # noqa: E402
from scripts.bench.timing import Stopwatch  # noqa: E402

CEILINGS = ("copy", "memory", "gemm", "attention")
NAMES = (*CEILINGS, *SUBJECTS)


def main(arguments: list[str] | None = None) -> int:
    """Measure or render; returns the exit status."""
    options = parse(arguments)
    try:
        if options.render is not None:
            print(write_table(options.render))
            return DONE
        return measure(options, command_line("bench_engine.py", arguments))
    except ConfigurationError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return WRONG


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, metavar="DIR", help="folder for rows.jsonl, manifest.json, table.md")
    add("--render", type=Path, metavar="DIR", help="make table.md anew from rows.jsonl, and stop")
    add("--shape", default="llama-3.1-8b", help=f"of the model: {', '.join(SHAPES)}")
    add("--lengths", metavar="N,N", help="prompt tokens (default: those of the shape)")
    add("--only", metavar="ROW,ROW", help=f"rows to measure: {', '.join(NAMES)}")
    add("--device", default="cuda", help="cuda, cuda:N; or cpu, with --shape tiny")
    add("--dtype", default="auto", help="auto is bfloat16 on a GPU and float32 on a CPU")
    add("--repeats", type=int, default=2, help="measured calls of each row; the median counts")
    add("--new-tokens", type=int, default=9, help="generated; the first is the prefill's")
    add("--warm-up-tokens", type=int, default=131072, help="longest prompt of a warm-up; 0: none")
    add("--chunk-tokens", type=int, help="of the chunked offload (default: the shape's)")
    add("--block-tokens", type=int, help="kvcache_block_size of the chunked offload")
    add("--gpu-blocks", type=int, help="num_gpu_blocks of the chunked offload")
    add("--device-memory-gb", type=float, help="cap for our engine, in GiB; alone offload_chunked")
    add("--host-memory-gb", type=float, help="CPU memory for our engine (default: as it detects)")
    add("--kernels", metavar="NAME,NAME", help="attention kernels (default: all that can run)")
    add("--seed", type=int, default=0, help="of the random weights")
    add("--threads", type=int, default=1, help="of the CPU")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace, command: str) -> int:
    """Measure every row asked for that the folder does not hold yet, and print the table.

    Raises:
        ConfigurationError: an option is wrong, or the folder is of other settings.
    """
    shape, lengths, names = check_options(options)
    device = find_device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dtype = resolve_dtype(options.dtype, device)
    torch.set_num_threads(options.threads)
    stopwatch = Stopwatch(device, SUSTAINED_SECONDS[device.type])
    bench = Bench(shape, device, dtype, stopwatch)
    settings = {
        "shape": shape.name,
        "dtype": str(dtype).removeprefix("torch."),
        "seed": options.seed,
        "threads": options.threads,
        "prompt": DESCRIPTION,
    }
    kernels, left_out = choose_kernels(options, bench, names)
    facts = {"gpu_state": gpu_state(device), "kernels_left_out": left_out}
    journal = Journal(options.out, settings | environment(device), command, facts)
    failed = 0
    try:
        for task in tasks(options, bench, lengths, names, kernels):
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


# --- options ------------------------------------------------------------------------------------


def check_options(options: argparse.Namespace) -> tuple[Shape, list[int], tuple[str, ...]]:
    """Return shape, lengths and names of the rows.

    Raises:
        UsageError: an option is missing, out of range or unknown.
    """
    if options.out is None:
        raise UsageError("--out is missing: name the folder for rows.jsonl and the table.")
    if options.shape not in SHAPES:
        raise unknown_name("--shape", options.shape, SHAPES)
    if options.dtype not in DTYPES:
        raise unknown_name("--dtype", options.dtype, DTYPES)
    shape = SHAPES[options.shape]
    for option, least in (
        ("repeats", 1), ("new_tokens", 1), ("warm_up_tokens", 0), ("threads", 1), ("seed", 0),
        ("chunk_tokens", 1), ("block_tokens", 1), ("gpu_blocks", 2), ("device_memory_gb", 0.001),
        ("host_memory_gb", 0.001),
    ):  # fmt: skip
        require_least(option, getattr(options, option), least)
    if options.kernels is not None:
        known_names("--kernels", options.kernels, tuple(KERNELS))
    lengths = prompt_lengths(options.lengths, shape, options.new_tokens)
    if options.only is not None:
        names = known_names("--only", options.only, NAMES)
    else:
        names = NAMES if options.device_memory_gb is None else (*CEILINGS, CHUNKED)
    return shape, lengths, names


# --- the rows -----------------------------------------------------------------------------------


def choose_kernels(
    options: argparse.Namespace, bench: Bench, names: Sequence[str]
) -> tuple[dict[str, Kernel], dict[str, str]]:
    """Return the attention kernels to measure, and why others are left out.

    Raises:
        ConfigurationError: one that --kernels names cannot run here.
    """
    if "attention" not in names:
        return {}, {}
    if options.kernels is None:
        return ceilings.attention_kernels(bench)
    chosen = known_names("--kernels", options.kernels, tuple(KERNELS))
    return {name: ceilings.named_kernel(bench, name) for name in chosen}, {}


def tasks(
    options: argparse.Namespace,
    bench: Bench,
    lengths: Sequence[int],
    names: Sequence[str],
    kernels: Mapping[str, Kernel],
) -> Iterator[Task]:
    """Yield the rows to measure: ceilings, then length by length."""
    if "copy" in names:
        yield _ceiling("copy", "copy", {}, partial(ceilings.copy_rates, bench))
    if "memory" in names:
        yield _ceiling("memory", "memory", {}, partial(ceilings.memory_rates, bench))
    if "gemm" in names:
        yield from _gemm_tasks(bench)
    plan = make_plan(options, bench)
    rectangle = (plan.chunked.chunk_tokens, plan.chunked.block_tokens)
    yield from _attention_tasks(bench, kernels, *rectangle, causal=False)
    for length in lengths:
        yield from _attention_tasks(bench, kernels, length, length, causal=True)
        for name in SUBJECTS:
            if name in names:
                yield _prompt_task(name, bench, plan, length)


def make_plan(options: argparse.Namespace, bench: Bench) -> Plan:
    """Return how whole prompts are measured."""
    named = bench.shape.chunked
    return Plan(
        weights=RandomWeights(bench.shape, bench.device, bench.dtype, options.seed),
        make_prompt=prompt_maker(),
        repeats=options.repeats,
        new_tokens=options.new_tokens,
        warm_up_tokens=options.warm_up_tokens,
        chunked=ChunkedSettings(
            chunk_tokens=options.chunk_tokens or named.chunk_tokens,
            block_tokens=options.block_tokens or named.block_tokens,
            gpu_blocks=options.gpu_blocks or named.gpu_blocks,
        ),
        device_memory_gb=options.device_memory_gb,
        host_memory_gb=options.host_memory_gb,
        threads=options.threads,
        device_type=bench.device.type,
    )


def _ceiling(
    key: str, name: str, settings: dict[str, Any], measurement: Callable[[], dict[str, float]]
) -> Task:
    return Task(key, "ceiling", name, None, settings, measurement)


def _gemm_tasks(bench: Bench) -> Iterator[Task]:
    for rows in bench.shape.gemm_rows:
        for product in bench.shape.products:
            settings = {"product": product.name, "rows": rows} | product._asdict()
            yield _ceiling(
                f"gemm {product.name}, {rows} rows",
                "gemm",
                settings,
                partial(ceilings.gemm_rate, bench, product, rows),
            )


def _attention_tasks(
    bench: Bench, kernels: Mapping[str, Kernel], queries: int, keys: int, *, causal: bool
) -> Iterator[Task]:
    what = f"{queries}, causal" if causal else f"{queries}x{keys}"
    for name, kernel in kernels.items():
        if ceilings.is_out_of_reach(bench, name, queries, keys):
            continue
        yield _ceiling(
            f"attention {name}, {what}",
            "attention",
            {"kernel": name, "queries": queries, "keys": keys, "causal": causal},
            partial(ceilings.attention_rate, bench, kernel, queries, keys, causal=causal),
        )


def _prompt_task(name: str, bench: Bench, plan: Plan, length: int) -> Task:
    settings = plan.settings_of(name)
    shown = "".join(
        f", {key}={value}"
        for key, value in settings.items()
        if (name == CHUNKED and key != "host_memory_gb") or key == "device_memory_gb"
    )
    calls = {
        "repeats": plan.repeats,
        "new_tokens": plan.new_tokens_of(name),
        "warm_up_tokens": min(length, plan.warm_up_tokens),
    }
    return Task(
        f"{name}, {length} tokens{shown}",
        "prompt",
        name,
        length,
        settings | calls,
        partial(subjects.measure, name, bench, plan, length),
    )


if __name__ == "__main__":
    gc.freeze()  # the modules' own objects need not be looked through between rows
    sys.exit(main())

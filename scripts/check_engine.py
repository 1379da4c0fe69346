"""Prove that the engine is right at full speed, on one device, in one command.

    python scripts/check_engine.py --out DIR                        # bits, accuracy, soak
    python scripts/check_engine.py --out DIR bits                   # one of them
    python scripts/check_engine.py --out DIR --acceptance           # the founding case
    python scripts/check_engine.py --out DIR --prepare-only         # only samples, on all cores
    python scripts/check_engine.py --out DIR --render               # only the report, anew

bits: three processes, three orders of requests, mixed lengths: equal digests of all logits, and
    those of an engine with everything on the device.
accuracy: the needle tasks on one persistent engine of each kind, scored by RULER's rules and
    compared bit by bit with an engine with everything on the device.
--acceptance: niah_single_1 with 2 slots; each miss is asked again of a fresh engine.
soak: many requests through one engine: the answers of fresh ones, and memory that stays flat.

Every answer is on disk (DIR/rows.jsonl) before the next request; the same command goes on where an
earlier one stopped. Exit status: 0 all is proven, 1 something is not, 2 a setting is wrong,
130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `scripts` and `ruler_bench`, wherever this is run from

from backends.base import ConfigurationError  # noqa: E402
from ruler_bench.command_line import terminable  # noqa: E402
from ruler_bench.device import device_name  # noqa: E402
from ruler_bench.errors import UsageError, unknown_name  # noqa: E402
from ruler_bench.model_files import model_folder  # noqa: E402
from ruler_bench.records import RecordingError  # noqa: E402
from ruler_bench.report.text import code_block, visible  # noqa: E402
from ruler_bench.sharing import portable_path  # noqa: E402
from ruler_bench.values import default_threads, resolve_device  # noqa: E402
from scripts.check import accuracy, bits, soak  # noqa: E402
from scripts.check.bench import Bench, Verdict  # noqa: E402
from scripts.check.engines import OFFLOADED, Cuts, EngineOptions  # noqa: E402
from scripts.check.ledger import REPORT, Ledger, open_ledger  # noqa: E402
from scripts.check.processes import Launch, in_processes  # noqa: E402
from scripts.check.questions import TASKS, Batch, Source, cut_batches, prepare  # noqa: E402

PROVEN, NOT_PROVEN, WRONG, INTERRUPTED = 0, 1, 2, 130
CHECKS = (bits.NAME, accuracy.NAME, soak.NAME)
JUDGES = {
    bits.NAME: bits.judge,
    accuracy.NAME: accuracy.judge,
    accuracy.ACCEPTANCE: accuracy.judge_acceptance,
    soak.NAME: soak.judge,
}
LENGTHS = (1, 2, 17, 255, 256, 257, 1024, 4096, 8191, 8192, 16384, 32768)
LONGEST_TOKENS = {"cpu": 8192, "cuda": 32768}
CHUNK_TOKENS = {"cpu": 1024, "cuda": 4096}
BLOCK_TOKENS = {"cpu": 512, "cuda": 4096}
PROCESSES = {"cpu": 1, "cuda": 3}


def main(arguments: Sequence[str] | None = None, launch: Launch = in_processes) -> int:
    options = parse(arguments)
    try:
        check_options(options)
        fill_defaults(options)
        if options.prepare_only:
            prepare_data(options)
            return PROVEN
        with open_ledger(options.out) as ledger:
            return prove(options, ledger, launch)
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG
    except RecordingError as error:
        print(f"error: {error}", file=sys.stderr)
        return NOT_PROVEN


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=", ".join(CHECKS))
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--prepare-only", action="store_true", help="make the samples, no engine")
    parser.add_argument("--render", action="store_true", help="write the report anew, no engine")

    engine = parser.add_argument_group("engines")
    engine.add_argument("--model", default="package:probe", help="folder (default: the probe)")
    engine.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    engine.add_argument("--threads", type=int, help="CPU threads of an engine (default: 1)")
    engine.add_argument("--dtype", default="auto")
    engine.add_argument("--attention", default="auto", metavar="KERNEL")
    engine.add_argument("--presets", nargs="+", default=list(OFFLOADED), metavar="PRESET")
    engine.add_argument("--chunk-tokens", type=int, help="default: 1024 on a CPU, 4096 on CUDA")
    engine.add_argument("--block-tokens", type=int, help="default: 512 on a CPU, 4096 on CUDA")
    engine.add_argument("--attend-tokens", help="a number or all (default: the block)")
    engine.add_argument("--slots", type=int, default=4, help="in bits and soak")
    engine.add_argument("--kv-buffers", type=int, default=2, help="of the layer-wise engine")
    engine.add_argument("--processes", type=int, help="at a time (default: 1, on CUDA 3)")

    data = parser.add_argument_group("requests")
    data.add_argument("--seed", type=int, default=42, help="of the samples")
    data.add_argument("--lengths", nargs="+", type=int, metavar="TOKENS", help="bits: of prompts")
    data.add_argument("--new-tokens", type=int, default=8, help="bits: generated after each")
    data.add_argument("--order-seed", type=int, default=0, help="bits: of the third order")
    data.add_argument("--tasks", nargs="+", default=list(TASKS), metavar="TASK", help="accuracy")
    data.add_argument("--length", type=int, default=32768, help="accuracy: tokens of a sample")
    data.add_argument("--samples", type=int, default=25, help="accuracy: of each task")
    data.add_argument("--acceptance", action="store_true", help="niah_single_1 with 2 slots")
    data.add_argument("--acceptance-samples", type=int, default=100)
    data.add_argument("--requests", type=int, default=1000, help="soak: how many")
    data.add_argument("--shortest", type=int, default=16, help="soak: tokens of a prompt")
    data.add_argument("--longest", type=int, help="soak: default 8192 on a CPU, 32768 on CUDA")
    data.add_argument("--fresh", default="100", help="soak: requests for fresh engines; or all")
    data.add_argument("--soak-seed", type=int, default=0, help="soak: of lengths and orders")
    return parser.parse_intermixed_args(arguments)


def check_options(options: argparse.Namespace) -> None:
    """Refuse what cannot be meant.

    Raises:
        UsageError: names the option.
    """
    for check in options.checks:
        if check not in CHECKS:
            raise unknown_name("check", check, CHECKS)
    for preset in options.presets:
        if preset not in OFFLOADED:
            raise unknown_name("preset", preset, OFFLOADED)
    for task in options.tasks:
        if task not in TASKS:
            raise unknown_name("task", task, TASKS)
    for name in ("tasks", "lengths", "presets"):
        values = getattr(options, name) or []
        if len(set(values)) != len(values):
            raise UsageError(f"--{name}: names one twice.")
    for name in ("threads", "chunk_tokens", "block_tokens", "slots", "kv_buffers", "processes",
                 "new_tokens", "length", "samples", "acceptance_samples", "requests", "shortest",
                 "longest"):  # fmt: skip
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value}: must be at least 1.")
    if min(options.lengths or [1]) < 1:
        raise UsageError(f"--lengths {min(options.lengths)}: must be at least 1.")
    options.attend_tokens = _number_or("attend-tokens", options.attend_tokens, "all")
    options.fresh = _number_or("fresh", options.fresh, "all")


def _number_or(name: str, text: str | None, word: str) -> int | str | None:
    if text is None or text == word:
        return text
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--{name} {text}: must be {word} or an integer of at least 1.")
    return int(text)


def fill_defaults(options: argparse.Namespace) -> None:
    """Fill in what depends on the device and on other options."""
    if not options.checks and not options.acceptance:
        options.checks = list(CHECKS)
    rendered = options.render or options.prepare_only
    options.device = "cpu" if rendered and options.device == "auto" else options.device
    options.device = resolve_device(options.device)
    kind = options.device.partition(":")[0]
    defaults: dict[str, Any] = {
        "threads": 1,
        "chunk_tokens": CHUNK_TOKENS[kind],
        "block_tokens": BLOCK_TOKENS[kind],
        "processes": default_threads() + 1 if options.prepare_only else PROCESSES[kind],
        "longest": LONGEST_TOKENS[kind],
        "lengths": [one for one in LENGTHS if one <= LONGEST_TOKENS[kind]],
    }
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.attend_tokens is None:
        options.attend_tokens = options.block_tokens
    if "offload" not in options.presets and (options.acceptance or soak.NAME in options.checks):
        raise UsageError("--presets: soak and --acceptance are about offload; name it too.")
    if options.shortest > options.longest:
        raise UsageError(f"--shortest {options.shortest}: is above --longest {options.longest}.")


def source(options: argparse.Namespace) -> Source:
    return Source(model_folder(options.model).resolve(), options.seed)


def prepare_data(options: argparse.Namespace) -> None:
    """Make every sample that the chosen checks need."""
    batches: dict[tuple[str, int], Batch] = {}

    def need(batch: Batch) -> None:
        known = batches.setdefault((batch.task, batch.length), batch)
        if known.samples < batch.samples:
            batches[batch.task, batch.length] = batch

    if bits.NAME in options.checks:
        for batch in cut_batches(max(options.lengths)):
            need(batch)
    if soak.NAME in options.checks:
        for batch in cut_batches(options.longest):
            need(batch)
    if accuracy.NAME in options.checks:
        for task in options.tasks:
            need(Batch(task, options.length, options.samples))
    if options.acceptance:
        need(Batch(accuracy.ACCEPTANCE_TASK, options.length, options.acceptance_samples))
    prepare(source(options), list(batches.values()), options.processes)
    print(f"{sum(one.samples for one in batches.values())} samples are prepared", file=sys.stderr)


def prove(options: argparse.Namespace, ledger: Ledger, launch: Launch) -> int:
    """Run the checks, write the report and return the exit status."""
    status = PROVEN
    chosen = [*options.checks, *([accuracy.ACCEPTANCE] if options.acceptance else [])]
    if options.render:
        chosen = list(ledger.manifest["checks"])
        if not chosen:
            raise UsageError(f"{options.out}: holds no check that could be rendered.")
    else:
        try:
            with terminable():
                run_checks(options, ledger, launch)
        except KeyboardInterrupt:
            status = INTERRUPTED
    verdicts = write_report(ledger)
    for verdict in verdicts:
        print(verdict_line(verdict))
    print(ledger.folder / REPORT)
    if status != PROVEN:
        return status
    if ledger.manifest["wrong_settings"]:
        return WRONG
    passed = {verdict.name: verdict.passed for verdict in verdicts}
    return PROVEN if all(passed[name] for name in chosen) else NOT_PROVEN


def run_checks(options: argparse.Namespace, ledger: Ledger, launch: Launch) -> None:
    attend = None if options.attend_tokens == "all" else options.attend_tokens
    bench = Bench(
        source=source(options),
        engines=EngineOptions(
            chunked=Cuts(options.chunk_tokens, attend),
            block_tokens=options.block_tokens,
            buffers=options.kv_buffers,
            attention=options.attention,
            presets=tuple(options.presets),
        ),
        device=options.device,
        threads=options.threads,
        dtype=options.dtype,
        processes=options.processes,
        launch=launch,
    )
    ledger.begin_command(command(), device_name(options.device))
    if bits.NAME in options.checks:
        bits.run(
            bench,
            ledger,
            lengths=options.lengths,
            new_tokens=options.new_tokens,
            slots=options.slots,
            seed=options.order_seed,
        )
    if accuracy.NAME in options.checks:
        accuracy.run(bench, ledger, options.tasks, options.length, options.samples)
    if options.acceptance:
        accuracy.run_acceptance(bench, ledger, options.length, options.acceptance_samples)
    if soak.NAME in options.checks:
        soak.run(
            bench,
            ledger,
            requests=options.requests,
            shortest=options.shortest,
            longest=options.longest,
            slots=options.slots,
            fresh=options.requests if options.fresh == "all" else options.fresh,
            seed=options.soak_seed,
        )


def command() -> list[str]:
    """Return the command line, without home folders."""
    return ["python", "scripts/check_engine.py", *(portable_path(one) for one in sys.argv[1:])]


# --- the report ---------------------------------------------------------------------------------


def write_report(ledger: Ledger) -> list[Verdict]:
    """Judge every check that was begun, from what is on disk, and write the report."""
    checks: dict[str, dict[str, Any]] = ledger.manifest["checks"]
    verdicts = [judge(ledger, checks[name]) for name, judge in JUDGES.items() if name in checks]
    (ledger.folder / REPORT).write_text(report(ledger, verdicts), encoding="utf-8")
    return verdicts


def verdict_line(verdict: Verdict) -> str:
    return f"{verdict.name}: {'proven' if verdict.passed else 'NOT PROVEN'}: {verdict.summary}"


def report(ledger: Ledger, verdicts: Sequence[Verdict]) -> str:
    """Return the whole report in Markdown."""
    parts = [
        "# The engine: bits, accuracy, soak",
        "\n".join(f"- {verdict_line(verdict)}" for verdict in verdicts),
    ]
    for verdict in verdicts:
        parts += [f"## {verdict.name}", *verdict.parts]
        parts.append(code_block(_settings_lines(ledger.manifest["checks"][verdict.name])))
    parts += ["## Commands", code_block(_command_lines(ledger.manifest["commands"]))]
    return "\n\n".join(parts) + "\n"


def _settings_lines(settings: dict[str, Any]) -> list[str]:
    lines = [
        f"{key} = {visible(str(value))}" for key, value in settings.items() if key != "engines"
    ]
    for engine in settings["engines"]:
        shown = " ".join(f"{key}={value}" for key, value in engine["settings"].items())
        lines.append(visible(f"{engine['name']}: {shown}"))
    return lines


def _command_lines(commands: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for one in commands:
        versions = ", ".join(f"{name} {version}" for name, version in one["versions"].items())
        lines.append(visible(f"{one['started']}  {' '.join(one['command'])}"))
        lines.append(visible(f"    {one['device']}; {versions}"))
    return lines


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())

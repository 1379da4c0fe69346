"""Sound but noisy engines: how often does the judge raise a false alarm?

Most runs are made in memory: the same engine, the same orders of requests and the same scoring as a
run, without processes and files. Some go through the runner, each fresh engine in a process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ruler_bench.asking import ask, record_of
from ruler_bench.bench import Bench, data_spec, load_tokenizers, planned
from ruler_bench.cell import Cell
from ruler_bench.folders import cache_dir
from ruler_bench.journal import Journal, prompt_hash
from ruler_bench.leak.arms import ENGINE_PER_SAMPLE, ONE_ENGINE, REFERENCE, Arm
from ruler_bench.leak.join import ArmFacts
from ruler_bench.lives import LocalLife
from ruler_bench.model_files import model_folder
from ruler_bench.questions import Questions
from ruler_bench.records import Record
from ruler_bench.streams import Stream
from scripts.detector.clean import figures
from scripts.detector.noisy import NOISES, REVEALS
from scripts.detector.runner import Finished, cell_of, run

LEAKCHECK = (
    "persistent",
    "persistent_again",
    "fresh",
    "fresh_again",
    "reference",
    "shuffled",
)
RATES = (0.01, 0.02, 0.05, 0.1)
ROUNDINGS = (0.0, 0.3, 1.0)
DTYPES = ("float32", "bfloat16")
WRONGS = ("alike", "otherwise")
TASKS = ("niah_single_1", "niah_multikey_1", "niah_multivalue")
RUNNER_SEED = 1_000_000
LENGTH_TOKENS = 1024
"""Prompts are short: the noisy engine looks the answer up."""
ENGINE = "scripts.detector.noisy.NoisyEngine"


@dataclass(frozen=True)
class Trial:
    """One noisy engine.

    Attributes:
        noise, rate, rounding, reveals, dtype, wrong, seed: see `NoisyEngine`.
        task: whose samples it is asked.
    """

    noise: str
    rate: float
    rounding: float
    reveals: str
    dtype: str
    wrong: str
    seed: int
    task: str

    @property
    def key(self) -> str:
        """Return a name for the trial, unique among all."""
        return f"{self.noise} {self.seed}"

    def settings(self, path: str = "own") -> dict[str, Any]:
        """Return the engine's settings on one of its paths."""
        return {
            "noise": self.noise,
            "rate": self.rate,
            "rounding": self.rounding,
            "reveals": self.reveals,
            "dtype": self.dtype,
            "wrong": self.wrong,
            "seed": self.seed,
            "path": path,
        }


def trials(runs: int, first_seed: int = 0) -> list[Trial]:
    """Return trials, kinds of noise in turn, and of each kind all combinations in turn.

    Args:
        runs: how many.
        first_seed: of the first; each has another.
    """
    kinds = itertools.cycle(NOISES)
    count = dict.fromkeys(NOISES, 0)
    found = []
    for seed in range(first_seed, first_seed + runs):
        noise = next(kinds)
        number = count[noise]
        count[noise] += 1
        rest, rate = divmod(number, len(RATES))
        rest, rounding = divmod(rest, len(ROUNDINGS))
        found.append(
            Trial(
                noise=noise,
                rate=RATES[rate],
                rounding=ROUNDINGS[rounding],
                # Not in step with the others, so that few runs have many combinations.
                reveals=REVEALS[(number + rest) % len(REVEALS)],
                dtype=DTYPES[(number // 2) % len(DTYPES)],
                wrong=WRONGS[(number // 4) % len(WRONGS)],
                seed=seed,
                task=TASKS[number % len(TASKS)],
            )
        )
    return found


def overrides(trial: Trial, samples: int) -> list[str]:
    """Return the command line of a trial through the runner."""
    own = [f"+backend.{key}={value}" for key, value in trial.settings().items()]
    other = [f"+reference.{key}={value}" for key, value in trial.settings("reference").items()]
    return [
        f"task={trial.task}",
        f"length={LENGTH_TOKENS}",
        f"num_samples={samples}",
        "device=cpu",
        "backend=custom",
        f"backend._target_={ENGINE}",
        *own,
        "backend@reference=custom",
        f"reference._target_={ENGINE}",
        *other,
        f"arms=[{','.join(LEAKCHECK)}]",
    ]


def through_runner(trial: Trial, samples: int, folder: Path) -> dict[str, Any]:
    """Run a trial as its command line would, and judge it."""
    finished = run(overrides(trial, samples), folder)
    return figures(finished, samples, finished.seconds)


class InMemory:
    """Makes runs without processes and files, on samples that are read once.

    Args:
        samples: of each run.
        folder: any; nothing is written.
    """

    def __init__(self, samples: int, folder: Path) -> None:
        self._samples = samples
        self._folder = folder
        self._benches: dict[str, Bench] = {}

    def measure(self, trial: Trial) -> dict[str, Any]:
        """Make a run of a trial, and judge it."""
        bench = self._bench(trial)
        records: list[Record] = []
        facts: dict[str, ArmFacts] = {}
        for stream in bench.streams:
            path = "reference" if stream.arm == REFERENCE else "own"
            settings = {"_target_": ENGINE, **trial.settings(path)}
            facts[stream.arm] = ArmFacts(
                Arm(
                    name=stream.arm,
                    lifetime=ENGINE_PER_SAMPLE if stream.kind.is_fresh else ONE_ENGINE,
                    backend=path,
                    settings=trial.settings(path),
                    order=stream.kind.order,
                )
            )
            records += _records(bench, stream, settings)
        steps = [step for stream in bench.streams for step in stream.steps]
        asked = [bench.questions.asked(step).question.sample for step in steps]
        prompts = {prompt_hash(one): one.prompt for one in asked}
        return figures(Finished(tuple(records), facts, prompts, 0.0), self._samples, 0.0)

    def _bench(self, trial: Trial) -> Bench:
        if trial.task not in self._benches:
            cell = cell_of(overrides(trial, self._samples), self._folder)
            self._benches[trial.task] = _bench(cell)
        return self._benches[trial.task]


def _bench(cell: Cell) -> Bench:
    model = model_folder(cell.model_path)
    counter, encoder = load_tokenizers(cell, model)
    questions = Questions(data_spec(cell, counter), encoder, cache_dir())
    planned_streams = planned(cell)
    questions.load(step for one in planned_streams for step in one.steps)
    return Bench(
        cell=cell,
        model=model,
        tokenizer=encoder,
        questions=questions,
        streams=planned_streams,
        stop_token_ids=(),
        journal=cast(Journal, None),  # nothing fails and nothing is cancelled: it is not asked
    )


def _records(bench: Bench, stream: Stream, settings: Mapping[str, Any]) -> Iterator[Record]:
    """Ask an arm's requests of engines in this process, whose noise is repeatable."""
    life: LocalLife | None = None
    number, position, predecessor = 0, 0, None
    for step in stream.steps:
        if life is None or stream.kind.is_fresh:
            number, position, predecessor = number + 1, 0, None
            life = LocalLife({**settings, "life": f"{stream.arm} {number}"}, {})
        place = {
            "arm": stream.arm,
            "step": step.step,
            "life": number,
            "position": position,
            "predecessor": predecessor,
        }
        yield record_of(bench, step, ask(bench, life, step), place)
        position, predecessor = position + 1, step.ordinal


def of_trial(trial: Trial, found: dict[str, Any]) -> dict[str, Any]:
    """Return a row's figures with the settings of its trial."""
    return {**trial.settings(), "task": trial.task, **found}

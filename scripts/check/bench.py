"""What all checks share: the model, the device, how to serve jobs, and what a check found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ruler_bench import model_files
from ruler_bench.device import device_name
from ruler_bench.errors import UsageError
from scripts.check.compare import Comparison, comparison_table, difference_table, settings_lines
from scripts.check.engines import (
    SOURCE_KEY,
    EngineOptions,
    EngineSpec,
    Pair,
    engines_of,
    source_sha256,
)
from scripts.check.ledger import Ledger
from scripts.check.processes import Launch
from scripts.check.questions import Source, load_task
from scripts.check.serving import Common, Job, Stream


@dataclass(frozen=True)
class Bench:
    """What all checks share.

    Attributes:
        source: model and seed of the samples.
        engines: settings of the engines.
        device, threads, dtype: of every engine.
        processes: how many jobs are served at a time.
        launch: serves them.
    """

    source: Source
    engines: EngineOptions
    device: str
    threads: int
    dtype: str
    processes: int
    launch: Launch

    def run(
        self,
        ledger: Ledger,
        jobs: Sequence[Sequence[Stream | None]],
        context_tokens: int,
        tasks: Sequence[str] = (),
    ) -> None:
        """Serve what is still missing of the streams; those of one list share a process.

        Args:
            ledger: takes what comes.
            jobs: streams; None where nothing is missing.
            context_tokens: prompt and generation that a request may take.
            tasks: whose answers are scored.
        """
        common = Common(
            model=self.source.model,
            device=self.device,
            threads=self.threads,
            dtype=self.dtype,
            max_model_len=self.context(context_tokens),
            stop_token_ids=model_files.stop_token_ids(self.source.model),
            metrics={task: load_task(task).metric for task in tasks},
        )
        pending = [tuple(stream for stream in job if stream is not None) for job in jobs]
        self.launch(
            [Job(common, streams) for streams in pending if streams], self.processes, ledger.take
        )

    def context(self, tokens: int) -> int:
        """Return the context of engines that are asked for so many tokens.

        Raises:
            UsageError: the model has fewer positions.
        """
        positions = model_files.max_positions(self.source.model)
        if positions is not None and tokens > positions:
            raise UsageError(
                f"requests of {tokens} tokens: the model has {positions} positions; ask for fewer."
            )
        return tokens

    def settings(self, pairs: Sequence[Pair], **more: Any) -> dict[str, Any]:
        """Return what decides the results of a check, for the manifest."""
        return {
            "device": device_name(self.device),
            "threads": self.threads,
            "dtype": self.dtype,
            SOURCE_KEY: source_sha256(),
            "model_sha256": model_files.fingerprint(self.source.model),
            "data_seed": self.source.seed,
            "engines": [asdict(one) for one in engines_of(list(pairs))],
            "pairs": [[pair.offloaded.name, pair.resident.name] for pair in pairs],
            **more,
        }


@dataclass(frozen=True)
class Verdict:
    """What a check found.

    Attributes:
        name: of the check.
        passed: whether it proves what it should.
        summary: in one line.
        parts: of its section in the report, in Markdown.
    """

    name: str
    passed: bool
    summary: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Evidence:
    """What every verdict rests on.

    Attributes:
        comparisons: all must have passed.
        problems: lines about what else went wrong.
    """

    comparisons: list[Comparison]
    problems: list[str]

    @property
    def passed(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.problems and all(one.passed for one in self.comparisons)

    @property
    def counts(self) -> str:
        """Return what was compared, in words."""
        requests = sum(one.requests for one in self.comparisons)
        digests = sum(one.digests for one in self.comparisons)
        missing = sum(one.missing for one in self.comparisons)
        different = sum(len(one.differences) for one in self.comparisons)
        return (
            f"{requests} pairs of answers compared, {digests} digests the same, "
            f"{different} answers different, {missing} missing"
        )

    def parts(self) -> list[str]:
        """Return the tables, in Markdown."""
        found = [comparison_table(self.comparisons)]
        differences = [one for each in self.comparisons for one in each.differences]
        if differences:
            found.append(difference_table(differences))
        problems = self.problems + settings_lines(self.comparisons)
        if problems:
            found.append("\n".join(f"- {line}" for line in problems))
        return found


def problems_of(ledger: Ledger, check: str, whole_arms: Sequence[str]) -> list[str]:
    """Return what ended streams early, and streams that needed more than the one engine allowed."""
    found = ledger.failures(f"{check}/")
    for arm in whole_arms:
        lives = {record.life for record in ledger.records(arm)}
        if len(lives) > 1:
            found.append(f"{arm}: answered by {len(lives)} engines instead of one; run it again")
    return found


def find_engine(pairs: Sequence[Pair], name: str) -> EngineSpec:
    """Return the engine of that name."""
    return next(one for one in engines_of(list(pairs)) if one.name == name)

"""Replaying: a reproducer's requests, asked again, of its own engine or of another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ruler_bench import model_files
from ruler_bench.leak.probe import BITS, Answer, change, counts_as, probe
from ruler_bench.leak.rebuild import PROCESS, check_engine, overridden, starter
from ruler_bench.leak.reproducer import Engine, Reproducer, read_reproducer
from ruler_bench.minimise_text import quoted, what_changes
from ruler_bench.tokenizer import Tokenizer

SAME, CHANGES = 0, 3


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What to replay.

    Attributes:
        folder: the reproducer's.
        overrides: settings of the engine, `key=value`.
        repeats: how often to ask; None for as often as it may take to show.
        fresh: "process" for a new process for each engine, "inprocess" for a new engine only.
    """

    folder: Path
    overrides: tuple[str, ...] = ()
    repeats: int | None = None
    fresh: str = PROCESS


def replay(options: ReplayOptions) -> int:
    """Ask a reproducer's requests again and return whether its answer still changes, as a status.

    Raises:
        UsageError: the folder is damaged, a setting wrong, or the engine cannot be built.
    """
    kept = read_reproducer(options.folder)
    engine = overridden(kept.engine, options.overrides)
    check_engine(engine)
    model = model_files.model_folder(engine.model_path)
    start = starter(engine, model, options.fresh)
    tokenizer = _tokenizer_of(model)
    tries = options.repeats or kept.tries_needed
    fresh = probe(start, kept.asks[-1:], tokenizer).answer or Answer(error="no answer")
    answers = [probe(start, kept.asks, tokenizer).answer for _ in range(tries)]
    shown = [
        one
        for one in answers
        if one is not None
        and (level := change(one, fresh, kept.level == BITS)) is not None
        and (counts_as(level, kept.level) or level != BITS)
    ]
    for line in _replayed(kept, engine, fresh, shown, answers):
        print(line)
    return CHANGES if shown else SAME


def _tokenizer_of(model: Path) -> Tokenizer | None:
    from ruler_bench.tokenizer import has_tokenizer, load_tokenizer  # noqa: PLC0415

    return load_tokenizer(str(model)) if has_tokenizer(model) else None


def _replayed(
    kept: Reproducer,
    engine: Engine,
    fresh: Answer,
    shown: Sequence[Answer],
    answers: Sequence[Answer | None],
) -> list[str]:
    others = len(kept.asks) - 1
    what = f"{kept.task}, ordinal {kept.ordinal}, after {others} other{'s' * (others > 1)} on "
    what += engine.backend
    lines = []
    if shown:
        how = what_changes(change(shown[0], fresh, True), fresh, shown[0])
        lines.append(f"{what}: shows in {len(shown)} of {len(answers)}: {how}.")
        lines.append(f"Fresh {quoted(fresh)}, after the others {quoted(shown[0])}.")
    else:
        lines.append(f"{what}: does not show in {len(answers)} of {len(answers)}.")
        lines.append(f"Fresh and after the others {quoted(fresh)}.")
    if change(fresh, kept.expected, False) is not None:
        lines.append(f"Note: a fresh engine answered {quoted(kept.expected)} where this was found.")
    return lines

"""What all requests of one cell share: its model, samples, streams and folder, all checked.

No engine is started here.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruler_bench import model_files
from ruler_bench.answer_prefix import check_answer_prefix
from ruler_bench.cell import Cell, NamedBackend
from ruler_bench.errors import UsageError
from ruler_bench.folders import cache_dir, folder_of
from ruler_bench.host import check_arm, checked_factory
from ruler_bench.journal import Journal
from ruler_bench.kept import BuildLife
from ruler_bench.leak.arms import variant_of
from ruler_bench.questions import Asked, Questions
from ruler_bench.streams import BESIDE, Stream, streams
from ruler_bench.tasks import DataSpec
from ruler_bench.tokenizer import Tokenizer, has_tokenizer, load_tokenizer


@dataclass(frozen=True)
class Bench:
    """All that the requests of one cell share."""

    cell: Cell
    model: Path
    tokenizer: Tokenizer
    questions: Questions
    streams: list[Stream]
    stop_token_ids: tuple[int, ...]
    journal: Journal
    references: list[NamedBackend] = field(default_factory=list)
    keep: BuildLife | None = None
    shown: set[str] = field(default_factory=set)

    def asked(self) -> list[Asked]:
        """Return every question that the run asks."""
        return [self.questions.asked(step) for one in self.streams for step in one.steps]

    def harness_arguments(self) -> dict[str, Any]:
        """Return what the harness knows of a backend's constructor arguments (backends.base)."""
        return harness_arguments(self.cell, self.model, self.context_tokens)

    @functools.cached_property
    def vocabulary(self) -> int | None:
        """Tokens that the model knows, or None where its folder does not say."""
        return model_files.vocabulary_size(self.model)

    @functools.cached_property
    def context_tokens(self) -> int:
        """Return the context that the engine is built for, the same for any choice of samples.

        Where another tokenizer measured the samples, what they take is rounded up to a quarter of
        the length, so that a folder can grow.
        """
        needed = max(one.question.tokens for one in self.asked())
        context = least_context_tokens(self.cell, self.model, self.tokenizer)
        if needed > context:
            step = max(1, self.cell.length // 4)
            context = -(-needed // step) * step
        positions = model_files.max_positions(self.model)
        return context if positions is None else min(context, positions)


def harness_arguments(cell: Cell, model: Path, context_tokens: int) -> dict[str, Any]:
    """Return a value for each of `backends.base.HARNESS_ARGUMENTS`."""
    return {
        "model_path": str(model),
        "device": cell.device,
        "threads": cell.threads,
        "max_model_len": context_tokens,
        "dtype": "auto",
        "run_folder": str(cell.folder),
    }


def least_context_tokens(cell: Cell, model: Path, tokenizer: Tokenizer) -> int:
    """Return the context that an engine needs where the model's own tokenizer measures samples.

    A BOS takes one token more than RULER counts.
    """
    context = cell.length + tokenizer.adds_bos
    positions = model_files.max_positions(model)
    return context if positions is None else min(context, positions)


def prepared(
    cell: Cell,
    model: Path,
    overwrite: bool = False,
    keep: BuildLife | None = None,
    only_look: bool = False,
) -> Bench:
    """Make the samples, read what is recorded, and check all that shows without an engine.

    Args:
        cell: what to run, checked by `check_cell`.
        model: its folder.
        overwrite: see `run_cell`.
        keep: likewise.
        only_look: the folder is left as it is.

    Raises:
        UsageError: a setting is wrong, or the folder holds something else.
    """
    counter, encoder = load_tokenizers(cell, model)
    data = data_spec(cell, counter)
    bench = Bench(
        cell=cell,
        model=model,
        tokenizer=encoder,
        questions=Questions(data, encoder, cache_dir()),
        streams=planned(cell),
        stop_token_ids=model_files.stop_token_ids(model),
        journal=Journal(cell, data, model, overwrite, only_look),
        references=list(cell.references),
        keep=keep,
    )
    bench.questions.load(step for one in bench.streams for step in one.steps)
    check_answer_prefix(bench.questions.samples(), cell.task)
    check_tokens(bench)
    bench.journal.verify(recorded_streams(bench), bench.questions, cell)
    return bench


def load_tokenizers(cell: Cell, model: Path) -> tuple[Tokenizer, Tokenizer]:
    """Return the tokenizer that measures the samples, and the model's, which the engine gets.

    `tokenizer=` names the first: with a common one, different models get the same questions. It
    serves as the model's too where that folder has none.
    """
    if cell.tokenizer == cell.model_path:
        own = load_tokenizer(str(model), cell.chat)
        return own, own
    counter = load_tokenizer(cell.tokenizer, cell.chat)
    return counter, load_tokenizer(str(model)) if has_tokenizer(model) else counter


def data_spec(cell: Cell, counter: Tokenizer) -> DataSpec:
    """Return what decides the samples of a cell."""
    return DataSpec(
        task=cell.task,
        length=cell.length,
        seed=cell.seed,
        template=cell.template,
        tokenizer=counter,
        qa_data=folder_of(cell.qa_data),
        data=folder_of(cell.data),
    )


def planned(cell: Cell) -> list[Stream]:
    """Return the streams of a cell, cheap arms first; what is recorded, of the first sample."""
    found = streams(cell.arms, cell.ordinals, cell.seed, boundary_units(cell))
    return [one.only(cell.ordinals[:1]) if records_steps(one.arm) else one for one in found]


def records_steps(arm: str) -> bool:
    """Tell whether an arm's engine writes down what it computes."""
    variant = variant_of(arm)
    return variant is not None and variant.records


def recordings(bench: Bench) -> Path:
    """Return the folder of what arms write down of their steps, one folder an arm."""
    return bench.journal.folder / "checkpoints"


def boundary_units(cell: Cell) -> list[int]:
    """Return the lengths around which the arm boundary asks: a block and a chunk, as far as known.

    Raises:
        UsageError: the arm is asked for and the backend has neither.
    """
    keys = ("kvcache_block_size", "chunk_tokens")
    found = [cell.backend_settings.get(key) for key in keys]
    units = list(dict.fromkeys(one for one in found if isinstance(one, int)))
    if not units and "boundary" in cell.arms:
        raise UsageError(
            f"arm boundary: the backend {cell.backend} has no {' or '.join(keys)} to ask around; "
            "set one, or leave the arm out."
        )
    return units


def recorded_streams(bench: Bench) -> list[Stream]:
    """Return the streams of every arm that is recorded, for the samples that there are."""
    records, cell = bench.journal.records, bench.cell
    known = {one.ordinal for one in records if one.ordinal <= max(cell.ordinals)}
    return streams(
        sorted(
            {one.arm for one in records} & set(bench.journal.arms())
            | {*cell.arms, "persistent", *BESIDE}
        ),
        sorted(known | set(cell.ordinals)),
        cell.seed,
        boundary_units(cell),
    )


# --- checks ---------------------------------------------------------------------------------------


def check_cell(cell: Cell) -> Path:
    """Check what can be checked before data are made and the engine is started.

    Returns:
        The model's folder.

    Raises:
        UsageError: the model, its length or a setting of the backend is wrong.
    """
    model = model_files.model_folder(cell.model_path)
    check_positions(cell, model)
    checked_factory(cell.backend_settings)
    for arm in cell.arms:
        if not (cell.is_diagnosis and variant_of(arm)):
            check_arm(arm, cell.backend_settings)
    for one in cell.references:
        checked_factory(one.settings)
    return model


def check_positions(cell: Cell, model: Path) -> None:
    """Refuse a length beyond the model's positions; warn beyond what it is known to be good for."""
    positions = model_files.max_positions(model)
    if positions is not None and cell.length > positions:
        raise UsageError(
            f"length={cell.length}: the model {cell.model} has {positions} positions "
            f"(max_position_embeddings); use length={positions} or less."
        )
    good = cell.good_length_tokens
    if good is not None and cell.length > good:
        print(
            f"warning: length={cell.length}: the model {cell.model} is known to be good up to "
            f"{good} tokens; misses beyond may be its own.",
            file=sys.stderr,
        )


def check_tokens(bench: Bench) -> None:
    """Refuse prompts that the model cannot take: too long, or of another vocabulary."""
    vocabulary = bench.vocabulary
    questions = [one.question for one in bench.asked()]
    largest = max(max(one.prompt_token_ids) for one in questions)
    if vocabulary is not None and largest >= vocabulary:
        raise UsageError(
            f"the tokenizer gives token {largest}, the model {bench.cell.model} has a vocabulary "
            f"of {vocabulary}: they do not belong together; name the model's own tokenizer."
        )
    positions = model_files.max_positions(bench.model)
    needed = max(one.tokens for one in questions)
    allowed = bench.cell.backend_settings.get("max_model_len")
    if isinstance(allowed, int) and needed > allowed:
        raise UsageError(
            f"backend.max_model_len={allowed}: a prompt with its generation takes {needed} tokens; "
            "set it to that or more, or null for what is needed."
        )
    if positions is not None and needed > positions:
        raise UsageError(
            f"length={bench.cell.length}: a prompt with its generation takes {needed} tokens of "
            f"the model {bench.cell.model}, which has {positions} positions "
            "(max_position_embeddings); use a smaller length."
        )

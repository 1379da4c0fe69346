"""One run of the harness, as its command line would start it, and what it left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf, open_dict

from ruler_bench.bench import data_spec, load_tokenizers, planned
from ruler_bench.cell import Cell
from ruler_bench.config import cells, config_dir, register_schemas
from ruler_bench.errors import UsageError, one_line
from ruler_bench.folders import cache_dir
from ruler_bench.journal import prompt_hash, read_run
from ruler_bench.leak.arms import REFERENCE
from ruler_bench.leak.join import PERSISTENT, ArmFacts, arm_facts
from ruler_bench.model_files import model_folder
from ruler_bench.questions import Questions
from ruler_bench.records import Record
from ruler_bench.run import run_cell

INTERRUPTED = 130


@dataclass(frozen=True)
class Finished:
    """What a run left.

    Attributes:
        records: of all arms.
        facts: of each arm.
        prompts: of every request, by `Record.prompt_sha256`.
        seconds: that its engines took to start and to answer, over all commands that added to it.
    """

    records: tuple[Record, ...]
    facts: Mapping[str, ArmFacts]
    prompts: Mapping[str, str]
    seconds: float

    def only(self, *arms: str) -> Finished:
        """Return these arms alone."""
        return replace(
            self,
            records=tuple(one for one in self.records if one.arm in arms),
            facts={name: one for name, one in self.facts.items() if name in arms},
        )

    def beside(self, other: Finished) -> Finished:
        """Return the arms of both, which must have different names."""
        return Finished(
            (*self.records, *other.records),
            {**self.facts, **other.facts},
            {**self.prompts, **other.prompts},
            self.seconds + other.seconds,
        )

    def named(self, arm: str, name: str) -> Finished:
        """Return one arm alone, under another name, as `ruler_bench.compare` takes a run."""
        facts = self.facts[arm]
        return Finished(
            tuple(replace(one, arm=name) for one in self.records if one.arm == arm),
            {name: replace(facts, arm=replace(facts.arm, name=name))},
            self.prompts,
            0.0,
        )

    def as_reference(self) -> Finished:
        """Return the persistent arm as the reference of another run; its seconds are not counted
        again.
        """
        return self.named(PERSISTENT, REFERENCE)


def cell_of(overrides: Sequence[str], folder: Path) -> Cell:
    """Compose the cell that a command line names.

    Args:
        overrides: as typed after `python -m ruler_bench`, `out=` apart.
        folder: where its results go.

    Raises:
        UsageError: an override is wrong.
    """
    register_schemas()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(config_dir().absolute()), version_base="1.3"):
            config = compose("config", overrides=list(overrides), return_hydra_config=True)
    except HydraException as error:
        raise UsageError(
            f"{' '.join(overrides)}: cannot be composed ({one_line(error)})."
        ) from error
    choices = {str(key): str(one) for key, one in config.hydra.runtime.choices.items()}
    OmegaConf.set_readonly(config, False)
    with open_dict(config):
        del config["hydra"]
        config.out = str(folder)
    (cell,) = cells(config, choices, [*overrides, f"out={folder}"])
    return cell


def run(overrides: Sequence[str], folder: Path) -> Finished:
    """Run a cell, or what is missing of it, and return all that its folder holds.

    Raises:
        UsageError, ConfigurationError: a setting is wrong.
        KeyboardInterrupt: the run was interrupted; the same call goes on.
    """
    cell = cell_of(overrides, folder)
    if run_cell(cell).status == INTERRUPTED:
        raise KeyboardInterrupt
    found = read_run(folder)
    if found is None:
        raise AssertionError(f"{folder} holds no run")
    return Finished(
        tuple(found.records),
        arm_facts(found.manifest, found.records),
        prompts_of(cell),
        seconds_of(found.manifest, found.records),
    )


def prompts_of(cell: Cell) -> dict[str, str]:
    """Return every prompt of a cell by its hash."""
    counter, encoder = load_tokenizers(cell, model_folder(cell.model_path))
    questions = Questions(data_spec(cell, counter), encoder, cache_dir())
    steps = [step for stream in planned(cell) for step in stream.steps]
    questions.load(steps)
    samples = [questions.asked(step).question.sample for step in steps]
    return {prompt_hash(one): one.prompt for one in samples}


def seconds_of(manifest: Mapping[str, Any], records: Sequence[Record]) -> float:
    """Return what the engines of a run took to start and to answer."""
    started = sum(one.get("start_seconds") or 0.0 for one in manifest.get("lives", []))
    return float(started) + sum(one.total_seconds or 0.0 for one in records)


def shown(overrides: Sequence[str]) -> str:
    """Return overrides as one would type them."""
    return " ".join(overrides)

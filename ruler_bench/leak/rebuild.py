"""A run built anew from its folder: its questions, its engine's settings, and the engine itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ruler_bench import manifest as manifests
from ruler_bench import model_files
from ruler_bench.asking import CANCEL_SECONDS
from ruler_bench.bench import data_spec, least_context_tokens, load_tokenizers, planned
from ruler_bench.cell import Cell
from ruler_bench.errors import UsageError, one_line, unknown_name
from ruler_bench.folders import cache_dir
from ruler_bench.host import check_fresh_engines, checked_factory, settings_of_arm
from ruler_bench.journal import prompt_hash
from ruler_bench.leak.arms import CANCEL, FILL, ONE_ENGINE, REFERENCES
from ruler_bench.leak.differences import difference
from ruler_bench.leak.join import (
    FRESH,
    FRESH_AGAIN,
    PERSISTENT,
    REFERENCE,
    ArmFacts,
    arm_facts,
    bits_differ_by,
)
from ruler_bench.leak.probe import Ask, Start
from ruler_bench.leak.reproducer import Engine
from ruler_bench.lives import Life, LocalLife, ProcessLife, StartFailed
from ruler_bench.manifest import RECORDS, read_manifest
from ruler_bench.questions import Questions
from ruler_bench.records import Record, read_records
from ruler_bench.streams import AGING_ORDINALS, Step
from ruler_bench.tasks import make_task
from ruler_bench.tokenizer import Chat, Tokenizer
from ruler_bench.values import MAX_THREADS, check_int, resolve_device

TIMEOUT_SECONDS = 3600.0
PROCESS, IN_PROCESS = "process", "inprocess"
NOT_WRITTEN_DOWN = "(not written down)"


@dataclass(frozen=True)
class RunFolder:
    """A run on disk.

    Attributes:
        path: its folder.
        manifest: its manifest.
        records: of all arms.
        facts: of each arm.
    """

    path: Path
    manifest: Mapping[str, Any]
    records: Sequence[Record]
    facts: Mapping[str, ArmFacts]


def read_run(path: Path) -> RunFolder:
    """Read a run folder.

    Raises:
        UsageError: it is none, or damaged.
    """
    found = read_manifest(path) if path.is_dir() else None
    records = read_records(path / RECORDS) if found is not None else []
    if found is None or not records:
        raise UsageError(
            f"{path}: is no run folder with {manifests.MANIFEST} and answers in {RECORDS}; name "
            "the folder that python -m ruler_bench printed."
        )
    return RunFolder(path, found, records, arm_facts(found, records, str(path)))


def served(run: RunFolder, arm: str) -> list[Record]:
    """Return the records of an arm of one engine, in the order in which they were served.

    Raises:
        UsageError: there is no such arm, or each of its requests had an engine of its own, or its
            engine is another than the run's.
    """
    if arm not in run.facts:
        raise unknown_name(f"arm in {run.path}", arm, run.facts)
    if arm in REFERENCES:
        raise UsageError(
            f"--arm {arm}: its settings are not those of the run; name an arm of the run's backend."
        )
    if run.facts[arm].arm.lifetime != ONE_ENGINE:
        raise UsageError(
            f"--arm {arm}: each of its requests had an engine of its own, so that nothing came "
            f"before it; name an arm of one engine, such as {PERSISTENT}."
        )
    mine = [one for one in run.records if one.arm == arm]
    return sorted(mine, key=lambda one: (one.life, one.position, one.step))


def control_arm(run: RunFolder, arm: str) -> str | None:
    """Return the arm that has the answers of fresh engines, or must have the same; else None."""
    for name in (FRESH, FRESH_AGAIN):
        if name in run.facts:
            return name
    if REFERENCE in run.facts and bits_differ_by(run.facts[arm], run.facts[REFERENCE]) is None:
        return REFERENCE
    return None


def differing(run: RunFolder, arm: str, control: str) -> list[Record]:
    """Return what an arm answered otherwise than the control, in the order served."""
    known = {
        (one.ordinal, one.prompt_sha256): one
        for one in run.records
        if one.arm == control and one.error is None
    }
    bitwise = bits_differ_by(run.facts[arm], run.facts[control]) is None
    found = []
    for record in served(run, arm):
        other = known.get((record.ordinal, record.prompt_sha256))
        is_answer = record.error is None and record.score is not None
        if is_answer and other is not None and difference(record, other, bitwise) is not None:
            found.append(record)
    return found


# --- the run's engine and questions, built anew -------------------------------------------------


@dataclass(frozen=True)
class Rebuilt:
    """What a run's manifest gives back.

    Attributes:
        engine: the backend and what the harness tells it.
        model: the model's folder.
        tokenizer: the model's.
        asks: the requests up to the victim, which is the last.
        notes: what is not as it was.
    """

    engine: Engine
    model: Path
    tokenizer: Tokenizer
    asks: tuple[Ask, ...]
    notes: tuple[str, ...]


def rebuilt(run: RunFolder, victim: Record, overrides: Sequence[str]) -> Rebuilt:
    """Build anew what asked for a record: the questions before it and the engine's settings.

    Raises:
        UsageError: the backend, the model or the data are not to be had as they were; names what.
    """
    cell = cell_of(run, victim.arm)
    engine = overridden(
        Engine(
            backend=cell.backend,
            settings=settings_of_arm(victim.arm, cell.backend_settings),
            model=cell.model,
            model_path=cell.model_path,
            device=cell.device,
            threads=cell.threads,
            max_model_len=0,
            timeout_seconds=TIMEOUT_SECONDS,
        ),
        overrides,
    )
    check_engine(engine)
    model = model_files.model_folder(engine.model_path)
    counter, encoder = load_tokenizers(cell, model)
    data = data_spec(cell, counter)
    questions = Questions(data, encoder, cache_dir())
    (stream,) = planned(cell)
    steps = {one.step: one for one in stream.steps}
    before = [
        one
        for one in served(run, victim.arm)
        if one.life == victim.life and one.position <= victim.position
    ]
    questions.load(steps[one.step] for one in before if one.step in steps)
    context = run.facts[victim.arm].arm.settings.get("max_model_len")
    if not isinstance(context, int):
        largest = max(
            questions.asked(one).question.tokens for one in steps.values() if questions.knows(one)
        )
        context = max(largest, least_context_tokens(cell, model, encoder))
    stops = model_files.stop_token_ids(model)
    asks = tuple(_ask_of(one, steps.get(one.step), questions, stops, context) for one in before)
    notes = []
    if len(before) <= victim.position:
        notes.append(
            f"{victim.position} requests came before ordinal {victim.ordinal}, and "
            f"{len(before) - 1} of them are still recorded"
        )
    if victim.earlier_requests:
        notes.append(
            f"{victim.earlier_requests} requests of earlier tasks came before, which are not asked "
            "here"
        )
    return Rebuilt(replace(engine, max_model_len=context), model, encoder, asks, tuple(notes))


def cell_of(run: RunFolder, arm: str) -> Cell:
    """Return the cell that a manifest describes, with one arm.

    Raises:
        UsageError: a setting is missing or damaged.
    """
    config = run.manifest.get("config")
    try:
        if not isinstance(config, dict):
            raise ValueError("there is no config")
        settings = dict(config["backend"])
        if settings.get("name") == run.manifest["backend"]:
            del settings["name"]
        ordinals = {one.ordinal for one in run.records if one.arm == arm}
        return Cell(
            task=make_task(config["task"]),
            length=config["length"],
            ordinals=tuple(sorted(one for one in ordinals if one < AGING_ORDINALS)),
            seed=config["seed"],
            template=config["template"],
            chat=Chat(config.get("system"), config.get("thinking")),
            tokenizer=config["tokenizer"],
            qa_data=config.get("qa_data"),
            data=config.get("data"),
            backend=run.manifest["backend"],
            backend_settings=settings,
            model=config["model"]["name"],
            model_path=config["model"]["path"],
            good_length_tokens=None,
            device=config["device"],
            threads=config["threads"],
            arms=(arm,),
            folder=run.path,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{run.path}: its {manifests.MANIFEST} does not tell how it was run "
            f"({type(error).__name__}: {one_line(error)}); run it anew."
        ) from error


def check_engine(engine: Engine) -> None:
    """Check that an engine's settings can be honoured here, as far as shows before it is built.

    Raises:
        UsageError: names what cannot.
    """
    secret = next((key for key, one in engine.settings.items() if one == NOT_WRITTEN_DOWN), None)
    if secret is not None:
        raise UsageError(f"backend.{secret}: was not written down; add backend.{secret}=VALUE.")
    checked_factory(engine.settings)
    check_fresh_engines("minimise", engine.settings)
    resolve_device(engine.device)


def _ask_of(
    record: Record,
    step: Step | None,
    questions: Questions,
    stop_token_ids: tuple[int, ...],
    context_tokens: int,
) -> Ask:
    """Return the request of a record, as the run asked it.

    Raises:
        UsageError: the prompt that is made now is another.
    """
    question = None if step is None else questions.asked(step).question
    if step is None or question is None or prompt_hash(question.sample) != record.prompt_sha256:
        raise UsageError(
            f"the prompt of ordinal {record.ordinal} (arm {record.arm}, step {record.step}) is "
            "another than the recorded one: the data, the tokenizer or the program have changed "
            "since; run it anew."
        )
    ask = Ask(
        request_id=record.step,
        ordinal=record.ordinal,
        prompt=question.sample.prompt,
        prompt_token_ids=question.prompt_token_ids,
        max_new_tokens=question.sample.tokens_to_generate,
        stop_token_ids=stop_token_ids,
    )
    if step.action == FILL:
        room = context_tokens - len(ask.prompt_token_ids)
        return replace(ask, max_new_tokens=room, stop_token_ids=())
    if step.action == CANCEL:
        return replace(ask, cancel_after_seconds=record.total_seconds or CANCEL_SECONDS)
    return ask


def starter(engine: Engine, model: Path, fresh: str) -> Start:
    """Return what builds a new engine.

    Args:
        engine: its settings.
        model: the model's folder.
        fresh: "process" or "inprocess".
    """
    harness = {
        "model_path": str(model),
        "device": engine.device,
        "threads": engine.threads,
        "max_model_len": engine.max_model_len,
        "dtype": "auto",
    }

    def start() -> Life:
        try:
            if fresh == IN_PROCESS:
                return LocalLife(engine.settings, harness)
            return ProcessLife(engine.settings, harness, timeout_seconds=engine.timeout_seconds)
        except StartFailed as error:
            raise UsageError(
                f"the backend {engine.backend} cannot be rebuilt ({one_line(error)})."
            ) from error

    return start


# --- overrides ----------------------------------------------------------------------------------

OVERRIDES = ("backend", "backend.KEY", "backend/GROUP", "device", "threads", "model.path")


def overridden(engine: Engine, overrides: Sequence[str]) -> Engine:
    """Return an engine with other settings.

    Args:
        engine: as recorded.
        overrides: `key=value`, as on the command line of a run.

    Raises:
        UsageError: a key or a value is wrong.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser  # noqa: PLC0415
    from hydra.errors import HydraException  # noqa: PLC0415

    groups, others = [], []
    for text in overrides:
        try:
            override = OverridesParser.create().parse_override(text)
            key, value = override.key_or_group, override.value()
        except HydraException as error:
            raise UsageError(f"{text}: cannot be read; settings are key=value.") from error
        if key == "backend" or key.startswith("backend/"):
            groups.append(text)
        elif key.startswith("backend.") or key in ("device", "threads", "model.path"):
            others.append((key, value))
        else:
            raise unknown_name("key", key, OVERRIDES)
    if groups:
        name, settings = _composed(groups)
        engine = replace(engine, backend=name or engine.backend, settings=settings)
    for key, value in others:
        engine = _with(engine, key, value)
    return engine


def _composed(groups: Sequence[str]) -> tuple[str | None, dict[str, Any]]:
    """Return the name and the settings of a backend's configuration."""
    import hydra  # noqa: PLC0415 (only where a backend is named)
    from hydra.core.global_hydra import GlobalHydra  # noqa: PLC0415
    from hydra.errors import HydraException, MissingConfigException  # noqa: PLC0415
    from omegaconf import OmegaConf  # noqa: PLC0415
    from omegaconf.errors import OmegaConfBaseException  # noqa: PLC0415

    from ruler_bench.config import config_dir, register_schemas  # noqa: PLC0415

    named = [one.partition("=")[2] for one in groups if one.startswith("backend=")]
    register_schemas()
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(config_dir().absolute()), version_base="1.3"):
            config = hydra.compose("config", overrides=list(groups))
        settings = OmegaConf.to_container(config.backend, resolve=True)
    except MissingConfigException as error:
        names = [str(one) for one in error.options or ()]
        raise unknown_name("backend", (named or list(groups))[-1], names) from error
    except (HydraException, OmegaConfBaseException) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"{' '.join(groups)}: {line}") from error
    assert isinstance(settings, dict)
    return (named[-1] if named else None), {str(key): one for key, one in settings.items()}


def _with(engine: Engine, key: str, value: Any) -> Engine:
    if key == "device":
        return replace(engine, device=resolve_device(str(value)))
    if key == "threads":
        return replace(engine, threads=check_int("threads", value, 1, MAX_THREADS))
    if key == "model.path":
        return replace(engine, model_path=str(value), model=Path(str(value)).name)
    *outer, last = key.split(".")[1:]
    settings = dict(engine.settings)
    inner = settings
    for name in outer:
        inner[name] = dict(inner[name]) if isinstance(inner.get(name), dict) else {}
        inner = inner[name]
    inner[last] = value
    return replace(engine, settings=settings)

r"""Train the probe model: a tiny Llama that answers every needle and follows chains of variables.

    python scripts/train_probe.py --prepare                       # once, needs no GPU
    python scripts/train_probe.py --out DIR --minutes 8.5 --resume   # repeat until it has ended
    python scripts/train_probe.py --out DIR --export ruler_bench/assets/probe

On one CUDA device. With --from FOLDER training starts from that folder's weights, with the shorter
schedule for fine-tuning and a fresh optimiser:

    python scripts/train_probe.py --out DIR --from ruler_bench/assets/probe --minutes 7 \
        --total-minutes 7 --finish

A piece ends by itself within --minutes and leaves a checkpoint in DIR (files of at most 15 MB);
the same command goes on from there. The schedule spreads over --total-minutes of all pieces
together; --finish makes it end within this piece. Training needs numpy, torch, safetensors,
tokenizers and the two files that --prepare makes; --prepare needs the project and its essays.

Training data never meet evaluation data: see scripts/probe/sequences.py.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

STARTED = time.monotonic()
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `scripts` and `ruler_bench`, wherever this is run from

import torch  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from scripts.probe import checkpoint, prompts  # noqa: E402
from scripts.probe.attention import plain_attention  # noqa: E402
from scripts.probe.corpus import Corpus  # noqa: E402
from scripts.probe.evaluation import evaluate, table  # noqa: E402
from scripts.probe.feed import Feed  # noqa: E402
from scripts.probe.model import ProbeConfig  # noqa: E402
from scripts.probe.schedule import FINE_TUNING, STAGES  # noqa: E402
from scripts.probe.sequences import SequenceBuilder  # noqa: E402
from scripts.probe.training import (  # noqa: E402
    Log,
    Settings,
    TimePlan,
    Trainer,
    save_configs,
    save_weights,
)
from scripts.probe.weights import WeightsError, read_weights  # noqa: E402

ASSETS = ROOT / "ruler_bench" / "assets" / "probe"
DATA = ROOT / "build" / "probe"
BATCH_TOKENS = 65_536
LOSS_POSITIONS = 16_384
EVALUATION_LENGTHS = (1024, 4096, 16384, 32768)
EVALUATION_SAMPLES = 20
EVALUATION_SEED = 2_718_281  # a seed of the tasks' own; the published table uses others
EVALUATION_BATCH_TOKENS = 524_288
EVALUATION_BATCH_SECONDS = 5.0  # no batch is begun with less time left


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--out", type=Path, default=DATA / "run", help="folder for checkpoint, weights and log")
    add("--minutes", type=float, default=8.5, help="wall time of this piece, start-up included")
    add("--total-minutes", type=float, default=16.0, help="wall time of all pieces together")
    add("--from", dest="source", metavar="FOLDER", type=Path, help="fine-tune a folder's weights")
    add("--finish", action="store_true", help="end the schedule within this piece")
    add("--resume", action="store_true", help="go on from the checkpoint in --out, if there is one")
    add("--seed", type=int, default=0, help="of weights and training data")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="data processes")
    add("--no-compile", action="store_true", help="run the model without torch.compile")
    add("--evaluation-seconds", type=float, default=40.0, help="kept free at the end of a piece")
    add("--data", type=Path, default=DATA, help="folder of corpus.npz and prompts.xz")
    add("--assets", type=Path, default=ASSETS, help="folder of the tokenizer")
    add("--prepare", action="store_true", help="make the tokenizer (if missing) and the data, stop")
    add("--export", type=Path, help="write weights and configs of --out to this folder, stop")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Prepare, export or train; returns the exit status."""
    options = parse(arguments)
    try:
        return run(options)
    except (checkpoint.CheckpointError, WeightsError) as error:
        print(error)
        return 2


def run(options: argparse.Namespace) -> int:
    """Do what the command line asks; returns the exit status.

    Raises:
        checkpoint.CheckpointError: there is no checkpoint to export, or not one to go on from.
        WeightsError: there are no weights to start from.
    """
    if options.prepare:
        prepare_data(options.assets, options.data)
        return 0
    if options.export is not None:
        export(options.out, options.export)
        return 0
    if (options.out / checkpoint.INDEX).exists() and not options.resume:
        print(f"{options.out} holds a checkpoint: add --resume, or choose another --out")
        return 2
    train(options)
    return 0


def prepare_data(assets: Path, data: Path) -> None:
    """Make tokenizer, corpus and evaluation prompts."""
    from scripts.probe import prepare  # noqa: PLC0415 (needs the project and its essays)

    config = ProbeConfig()
    if not (assets / "tokenizer.json").exists():
        prepare.make_tokenizer(assets, config.vocab_size, config.max_positions)
    save_configs(config, assets)
    tokenizer = Tokenizer.from_file(str(assets / "tokenizer.json"))
    prepare.make_corpus(tokenizer).save(data / "corpus.npz")
    prompts.save(
        data / "prompts.xz",
        prepare.make_prompts(assets, EVALUATION_LENGTHS, EVALUATION_SAMPLES, EVALUATION_SEED),
    )


def export(run: Path, folder: Path) -> None:
    """Write a run's weights and configs in Hugging Face format."""
    from scripts.probe.model import Probe  # noqa: PLC0415

    tensors, state = checkpoint.load(run)
    model = Probe(ProbeConfig(**state["config"]), torch.float32)
    model.load_state_dict(
        {
            name.removeprefix("weight/"): tensor
            for name, tensor in tensors.items()
            if name.startswith("weight/")
        }
    )
    save_weights(model, folder)
    save_configs(model.config, folder)


def train(options: argparse.Namespace) -> None:
    """Train one piece, then evaluate real prompts as far as the time goes."""
    weights = None
    if options.source is not None:
        weights = read_weights(options.source, ProbeConfig(), options.assets)
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "train.log").open("a", encoding="utf-8") as log_file:

        def log(line: str) -> None:
            print(line, flush=True)
            log_file.write(line + "\n")
            log_file.flush()

        if not (options.data / "corpus.npz").exists():
            prepare_data(options.assets, options.data)
        builder = SequenceBuilder(Corpus.load(options.data / "corpus.npz"))
        # The workers are forked here, before the device is touched.
        feed = Feed(
            builder,
            seed=options.seed,
            batch_tokens=BATCH_TOKENS,
            loss_positions=LOSS_POSITIONS,
            workers=options.workers,
        )
        try:
            trainer = train_piece(options, feed, weights, log)
        finally:
            feed.close()
        evaluate_piece(options, trainer, log)


def train_piece(
    options: argparse.Namespace, feed: Feed, weights: dict[str, torch.Tensor] | None, log: Log
) -> Trainer:
    """Train one piece, a new run's from `weights`, and return the trainer with its model."""
    device = torch.device(options.device)
    settings = Settings(
        seed=options.seed,
        batch_tokens=BATCH_TOKENS,
        loss_positions=LOSS_POSITIONS,
        stages=STAGES if weights is None else FINE_TUNING,
        compile=device.type == "cuda" and not options.no_compile,
        log_seconds=10.0,
    )
    plan = TimePlan(
        started=STARTED,
        piece_seconds=60 * options.minutes,
        total_seconds=60 * options.total_minutes,
        evaluation_seconds=options.evaluation_seconds,
        finish=options.finish,
    )
    trainer = Trainer(ProbeConfig(), settings, feed, device=device, folder=options.out, log=log)
    if options.resume and (options.out / checkpoint.INDEX).exists():
        trainer.resume()
    elif weights is not None:
        trainer.model.load_hf_state(weights)
    trainer.run(plan)
    return trainer


def evaluate_piece(options: argparse.Namespace, trainer: Trainer, log: Log) -> None:
    """Answer real prompts, as many as the piece's time allows, and log the table."""
    trainer.model.use_plain_regions()
    deadline = STARTED + 60 * options.minutes
    scores = evaluate(
        trainer.model,
        Tokenizer.from_file(str(options.assets / "tokenizer.json")),
        prompts.load(options.data / "prompts.xz"),
        attention=plain_attention,
        batch_tokens=EVALUATION_BATCH_TOKENS,
        out_of_time=lambda: time.monotonic() > deadline - EVALUATION_BATCH_SECONDS,
    )
    log(table(scores))


if __name__ == "__main__":
    sys.exit(main())

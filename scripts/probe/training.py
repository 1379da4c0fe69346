"""The training loop: one piece of a run, from start-up to checkpoint, within its time."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from scripts.probe import checkpoint
from scripts.probe.attention import fastest
from scripts.probe.families import FAMILIES
from scripts.probe.feed import Feed
from scripts.probe.model import Attention, Probe, ProbeConfig
from scripts.probe.rows import Batch
from scripts.probe.schedule import Position, Schedule, Stage

Log = Callable[[str], None]

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.05
CLIP_NORM = 1.0
STEPS_PER_READING = 10  # of the accuracy, which waits for the device
STEPS_PER_SNAPSHOT = 200
BAD_STEPS_BEFORE_RESTORE = 3
SECONDS_PER_CHECKPOINT = 120.0
STOP_SECONDS = 6.0  # to write the last checkpoint of a piece
ACCURACY_MEMORY = 0.8  # of the running accuracies at each reading


@dataclass(frozen=True)
class Settings:
    """What a run is made of, its data apart.

    Attributes:
        seed: of the weights and of the training data.
        batch_tokens: tokens of a micro-batch.
        loss_positions: places of the loss in a micro-batch.
        stages: the curriculum.
        compile: whether to compile the regions (CUDA).
        log_seconds: between log lines.
    """

    seed: int
    batch_tokens: int
    loss_positions: int
    stages: tuple[Stage, ...]
    compile: bool
    log_seconds: float


@dataclass(frozen=True)
class TimePlan:
    """The time a piece has, in seconds of `time.monotonic` and of the whole run.

    Attributes:
        started: when this process began.
        piece_seconds: for this process, evaluation included.
        total_seconds: for all pieces together.
        evaluation_seconds: kept free at the end of a piece.
        finish: whether the schedule must end within this piece.
    """

    started: float
    piece_seconds: float
    total_seconds: float
    evaluation_seconds: float
    finish: bool

    def spent(self) -> float:
        """Return the seconds since this process began."""
        return time.monotonic() - self.started

    def piece_left(self) -> float:
        """Return the seconds in which this piece can still train."""
        return self.piece_seconds - self.evaluation_seconds - STOP_SECONDS - self.spent()

    def training_left(self, spent_before: float, start_up_seconds: float) -> float:
        """Return the seconds of training the whole budget still holds.

        Args:
            spent_before: seconds of earlier pieces.
            start_up_seconds: what this piece needed before its first step; each piece to come is
                taken to need as much.
        """
        here = self.piece_left()
        if self.finish:
            return max(0.0, here)
        beyond = self.total_seconds - spent_before - self.piece_seconds
        if beyond <= 0:
            return max(0.0, here + min(0.0, beyond))
        lost = start_up_seconds + self.evaluation_seconds + STOP_SECONDS
        pieces = math.ceil(beyond / self.piece_seconds)
        return max(0.0, here) + max(0.0, beyond - pieces * lost)


class Trainer:
    """Trains the probe for one piece.

    Args:
        config: shape of the model.
        settings: what the run is made of.
        feed: makes the batches.
        device: cuda or cpu.
        folder: checkpoints and weights go here.
        log: takes lines.
    """

    def __init__(
        self,
        config: ProbeConfig,
        settings: Settings,
        feed: Feed,
        *,
        device: torch.device,
        folder: Path,
        log: Log,
    ) -> None:
        self.settings, self.feed, self.device = settings, feed, device
        self.folder, self.log = folder, log
        torch.manual_seed(settings.seed)
        compute = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = Probe(config, compute).to(device)
        self.optimizer = self._make_optimizer()
        self.schedule = Schedule(settings.stages, Position())
        self.attention: dict[int, Attention] = {}
        self.next_batch, self.tokens_seen = 0, 0
        self.spent_before = 0.0
        self.accuracies = np.zeros(len(FAMILIES))  # of answer tokens lately, by family
        self._in_flight = 0
        self._tallies = torch.zeros(2, len(FAMILIES) + 1, device=device)
        self._losses = torch.zeros(2, device=device)
        self._window = Window()
        self._unread_steps = 0
        self._bad_steps = 0
        self._snapshot: dict[str, Tensor] | None = None

    # State

    def tensors(self) -> dict[str, Tensor]:
        """Return weights and optimiser moments by name."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            moments = self.optimizer.state.get(parameter, {})
            found[f"weight/{name}"] = parameter.detach()
            for moment in ("exp_avg", "exp_avg_sq"):
                found[f"{moment}/{name}"] = moments.get(moment, torch.zeros_like(parameter))
        return found

    def restore_tensors(self, tensors: dict[str, Tensor], optimizer_steps: int) -> None:
        """Put back what `tensors` returned."""
        for name, parameter in self.model.named_parameters():
            with torch.no_grad():
                parameter.copy_(tensors[f"weight/{name}"])
            self.optimizer.state[parameter] = {
                "step": torch.tensor(
                    float(optimizer_steps),
                    device=self.device if self.device.type == "cuda" else "cpu",
                ),
                "exp_avg": tensors[f"exp_avg/{name}"].to(self.device, copy=True),
                "exp_avg_sq": tensors[f"exp_avg_sq/{name}"].to(self.device, copy=True),
            }

    def save(self, spent: float) -> None:
        """Write a checkpoint and the weights as they would ship."""
        state = {
            "position": self.schedule.position.as_dict(),
            "next_batch": self.next_batch,
            "tokens_seen": self.tokens_seen,
            "accuracies": self.accuracies.tolist(),
            "lengths": self._lengths(),
            "spent_seconds": self.spent_before + spent,
            "seed": self.settings.seed,
            "config": self.model.config.as_dict(),
        }
        checkpoint.save(self.folder, self.schedule.position.steps, self.tensors(), state)
        save_weights(self.model, self.folder)

    def resume(self) -> None:
        """Go on from the folder's checkpoint.

        Raises:
            checkpoint.CheckpointError: there is none, or it is damaged or of another run.
        """
        tensors, state = checkpoint.load(self.folder)
        if state["config"] != self.model.config.as_dict() or state["seed"] != self.settings.seed:
            raise checkpoint.CheckpointError(
                f"{self.folder} holds a run of another shape or seed; choose another folder"
            )
        if state.get("lengths") != self._lengths():
            raise checkpoint.CheckpointError(
                f"{self.folder} holds a run with other stages: a run that was begun with --from"
                " goes on with it, one begun without goes on without"
            )
        position = Position(**state["position"])
        self.schedule = Schedule(self.settings.stages, position)
        self.restore_tensors(tensors, position.steps)
        self.next_batch, self.tokens_seen = state["next_batch"], state["tokens_seen"]
        self.spent_before = state["spent_seconds"]
        self.accuracies = np.array(state["accuracies"])

    # One piece

    def run(self, plan: TimePlan) -> None:
        """Start up, then train until the piece's time is over or the schedule ends."""
        if not self.schedule.finished:
            self._start_up()
        start_up = plan.spent()
        self.log(f"first step after {start_up:.0f} s; {self._where()}")
        last_save = last_log = last = time.monotonic()
        while not self.schedule.finished and plan.piece_left() > 0:
            self._step()
            now = time.monotonic()
            left = plan.training_left(self.spent_before, start_up)
            if self.schedule.advance(now - last, left, float(self.accuracies.min())):
                self._report(now - last_log, plan, left)
                last_log = now
                self.log(f"stage {self.schedule.position.stage + 1}: {self._where()}")
            last = now
            if now - last_log >= self.settings.log_seconds:
                self._report(now - last_log, plan, left)
                last_log = now
            if now - last_save >= SECONDS_PER_CHECKPOINT:
                self.save(plan.spent())
                last = last_save = time.monotonic()
        self._report(time.monotonic() - last_log, plan, 0.0)
        self.save(plan.spent())
        self.log(f"piece ends after {plan.spent():.0f} s; {self._where()}")

    def _start_up(self) -> None:
        """Choose kernels, compile, and fill the queue of batches."""
        config = self.model.config
        position = self.schedule.position
        lengths = tuple(
            sorted({n for stage in self.settings.stages[position.stage :] for n in stage.mix})
        )
        self._ask_ahead()
        self.attention = fastest(
            lengths,
            self.settings.batch_tokens,
            (config.num_heads, config.num_kv_heads, config.head_dim),
            self.device,
            self.log,
        )
        if self.settings.compile:
            self.model.compile_regions()
        try:
            self._warm_up(lengths)
        except Exception as error:
            if not self.settings.compile:
                raise
            self.log(f"compiling failed, going on without: {str(error).splitlines()[0][:200]}")
            self.model.use_plain_regions()
            self._warm_up(lengths)

    def _warm_up(self, lengths: tuple[int, ...]) -> None:
        """Run every length forward and backward once on noise, changing nothing."""
        generator = np.random.default_rng(0)
        places = self.settings.loss_positions
        for length in lengths:
            rows = self.settings.batch_tokens // length
            self._forward_backward(
                Batch(
                    tokens=generator.integers(4, 260, (rows, length)).astype(np.int16),
                    positions=np.zeros(places, np.int32),
                    targets=np.full(places, 5, np.int16),
                    answer_weights=np.full(places, 1 / places, np.float32),
                    other_weights=np.zeros(places, np.float32),
                    families=np.full(places, len(FAMILIES), np.int8),
                ),
                1.0,
            )
        self.optimizer.zero_grad(set_to_none=True)
        self._tallies.zero_()
        self._losses.zero_()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _step(self) -> None:
        stage = self.schedule.stage
        rate = self.schedule.learning_rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for _ in range(stage.batches_per_step):
            batch = self.feed.take()
            self._in_flight -= 1
            self._ask_ahead()
            self._forward_backward(batch, 1 / stage.batches_per_step)
            self.tokens_seen += batch.tokens.size
            self._window.tokens += batch.tokens.size
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self._unread_steps += 1
        if math.isfinite(float(norm)):
            self._window.norm = max(self._window.norm, float(norm))
            self.optimizer.step()
            self._bad_steps = 0
        else:
            self._bad_step()
        self.optimizer.zero_grad(set_to_none=True)
        steps = self.schedule.position.steps
        if self._unread_steps >= STEPS_PER_READING:
            self._read_tallies()
        if steps % STEPS_PER_SNAPSHOT == 0 and self._bad_steps == 0:
            self._snapshot = {name: tensor.clone() for name, tensor in self.tensors().items()}

    def _forward_backward(self, batch: Batch, weight: float) -> None:
        tokens, positions, targets, answer_weights, other_weights, families = (
            self._to_device(array) for array in batch
        )
        parts = self.model.loss(
            tokens.long(),
            self.attention[tokens.shape[1]],
            positions=positions.long(),
            targets=targets.long(),
            answer_weights=answer_weights,
            other_weights=other_weights,
        )
        loss = parts.answers + self.schedule.stage.other_weight * parts.others
        torch.autograd.backward(loss * weight)
        with torch.no_grad():
            self._tallies[0].index_add_(0, families.long(), parts.correct)
            self._tallies[1].index_add_(0, families.long(), torch.ones_like(parts.correct))
            self._losses += weight * torch.stack([parts.answers, parts.others])

    def _to_device(self, array: np.ndarray[Any, Any]) -> Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor

    def _ask_ahead(self) -> None:
        """Keep two batches a worker asked for; which length comes next depends on its number."""
        while self._in_flight < self.feed.ahead:
            rng = np.random.default_rng([self.settings.seed, self.next_batch])
            self.feed.ask(self.next_batch, self.schedule.draw_length(rng))
            self._in_flight += 1
            self.next_batch += 1

    def _bad_step(self) -> None:
        """Skip a step whose gradient is not finite; after a few in a row, go back."""
        self._bad_steps += 1
        self.log(f"step {self.schedule.position.steps}: gradient not finite, step skipped")
        if self._bad_steps >= BAD_STEPS_BEFORE_RESTORE and self._snapshot is not None:
            self.log("going back to the last good weights")
            self.restore_tensors(self._snapshot, self.schedule.position.steps)
            self._bad_steps = 0

    # Reporting

    def _read_tallies(self) -> None:
        window, tallies = self._window, self._tallies.cpu().numpy()
        window.tallies += tallies
        window.losses += self._losses.cpu().numpy()
        window.read_steps += self._unread_steps
        self._unread_steps = 0
        right, count = tallies[:, : len(FAMILIES)]
        seen = (count > 0) & np.isfinite(right)
        memory = np.where(self.accuracies[seen] > 0, ACCURACY_MEMORY, 0.0)
        self.accuracies[seen] *= memory
        self.accuracies[seen] += (1 - memory) * right[seen] / count[seen]
        self._tallies.zero_()
        self._losses.zero_()

    def _report(self, seconds: float, plan: TimePlan, left: float) -> None:
        window, at = self._window, self.schedule.position
        answers, others = window.losses / max(1, window.read_steps)
        rates = " ".join(
            f"{family.name.removeprefix('niah_')} {right / count:.4f}"
            for family, right, count in zip(FAMILIES, *window.tallies[:, :-1], strict=True)
            if count
        )
        self.log(
            f"{plan.spent():5.0f} s stage {at.stage + 1} step {at.steps} "
            f"progress {at.progress:.3f} left {left:.0f} s "
            f"tokens {self.tokens_seen / 1e6:.0f}M "
            f"{window.tokens / max(seconds, 1e-9) / 1e6:.3f}M/s "
            f"lr {self.schedule.learning_rate():.2e} norm<={window.norm:.2f} "
            f"loss answers {answers:.4f} others {others:.3f} "
            f"right lately {self.accuracies.min():.4f} or more: {rates}"
        )
        self._window = Window()

    def _where(self) -> str:
        at = self.schedule.position
        return (
            f"step {at.steps}, progress {at.progress:.3f}, {self.tokens_seen / 1e6:.0f}M tokens, "
            f"length {self.schedule.stage.length}"
        )

    def _lengths(self) -> list[int]:
        return [stage.length for stage in self.settings.stages]

    def _make_optimizer(self) -> torch.optim.AdamW:
        parameters = list(self.model.parameters())
        return torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
                {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=0.0,
            betas=BETAS,
            fused=self.device.type == "cuda",
        )


class Window:
    """Sums since the last log line."""

    def __init__(self) -> None:
        self.tokens = self.read_steps = 0
        self.norm = 0.0
        self.tallies = np.zeros((2, len(FAMILIES) + 1))
        self.losses = np.zeros(2)


def save_weights(model: Probe, folder: Path) -> None:
    """Write model.safetensors in bfloat16, replacing it in one step."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / ".model.safetensors.part"
    save_file(model.hf_state(torch.bfloat16), temporary, metadata={"format": "pt"})
    temporary.replace(folder / "model.safetensors")


def save_configs(config: ProbeConfig, folder: Path) -> None:
    """Write config.json and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("config.json", config.to_hf()),
        ("generation_config.json", config.generation_config()),
    ):
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")

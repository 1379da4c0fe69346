"""Worker processes that build micro-batches, asked for by number and length."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
from multiprocessing.process import BaseProcess

from scripts.probe.rows import Batch
from scripts.probe.sequences import SequenceBuilder

BATCHES_AHEAD = 2  # asked for, a worker
PARENT_CHECK_SECONDS = 2.0
ANSWER_SECONDS = 120.0


class Feed:
    """Micro-batches from worker processes, in the order they come.

    The training loop asks ahead and takes; a batch depends only on its number and length, so
    which worker builds it does not matter. Create it before CUDA is touched: the workers are
    forked, and share the corpus.

    Args:
        builder: builds the batches.
        seed: of the run.
        batch_tokens: tokens of a micro-batch.
        loss_positions: places of the loss in a micro-batch.
        workers: processes; 0 builds in this one.

    Attributes:
        ahead: how many batches to ask for before they are taken.
    """

    def __init__(
        self,
        builder: SequenceBuilder,
        *,
        seed: int,
        batch_tokens: int,
        loss_positions: int,
        workers: int,
    ) -> None:
        self._builder = builder
        self._arguments = (seed, batch_tokens, loss_positions)
        self._asked: list[tuple[int, int]] = []
        self.ahead = max(1, BATCHES_AHEAD * workers)
        self._workers: list[BaseProcess] = []
        if workers:
            context = multiprocessing.get_context("fork")
            self._requests = context.Queue()
            self._batches = context.Queue()
            self._workers = [
                context.Process(target=self._work, args=(os.getpid(),), daemon=True)
                for _ in range(workers)
            ]
            for worker in self._workers:
                worker.start()

    def ask(self, number: int, length: int) -> None:
        """Ask for micro-batch `number` with rows of `length` tokens."""
        if self._workers:
            self._requests.put((number, length))
        else:
            self._asked.append((number, length))

    def take(self) -> Batch:
        """Return the next batch that is done.

        Raises:
            RuntimeError: a worker has died, or nothing came for two minutes.
        """
        if not self._workers:
            return self._build(*self._asked.pop(0))
        waited = 0.0
        while True:
            try:
                fields: tuple[object, ...] = self._batches.get(timeout=PARENT_CHECK_SECONDS)
            except queue.Empty:
                waited += PARENT_CHECK_SECONDS
                dead = [w.exitcode for w in self._workers if not w.is_alive()]
                if dead or waited >= ANSWER_SECONDS:
                    raise RuntimeError(
                        f"no training batch for {waited:.0f} s; exit codes of dead workers: {dead}"
                    ) from None
            else:
                return Batch(*fields)  # type: ignore[arg-type]

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            worker.join()
        self._workers = []

    def _build(self, number: int, length: int) -> Batch:
        seed, batch_tokens, loss_positions = self._arguments
        return self._builder.batch(seed, number, length, batch_tokens, loss_positions)

    def _work(self, parent: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while os.getppid() == parent:
            try:
                number, length = self._requests.get(timeout=PARENT_CHECK_SECONDS)
            except queue.Empty:
                continue
            self._batches.put(tuple(self._build(number, length)))

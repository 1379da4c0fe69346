"""The answer to one request: tokens chosen from logits that were brought to CPU memory."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from backends.base import FinishReason, NonFiniteLogits, Request
from backends.digest import LogitsTrace


class HostLogits:
    """Brings rows of logits to CPU memory, into two buffers that take turns."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._rows = torch.empty(2, vocabulary, dtype=torch.float32, pin_memory=self._on_gpu)
        self._next = 0

    def fetch(self, logits: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [vocabulary] once they are there; good for one more call."""
        row = self._rows[self._next]
        self._next = 1 - self._next
        row.copy_(logits, non_blocking=True)
        if self._on_gpu:
            torch.cuda.current_stream(logits.device).synchronize()
        return row


@dataclass(slots=True)
class Answer:
    """The tokens chosen so far, and what they were chosen from. Times are of perf_counter."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    reused_tokens: int = 0
    started_at: float = field(default_factory=time.perf_counter)
    first_token_at: float = 0.0
    done_at: float = 0.0

    def choose(self, row: torch.Tensor) -> int:
        """Choose the best token from logits [vocabulary]; the lowest id among equals."""
        # NumPy promises the first of equal maxima, PyTorch does not.
        token = int(row.numpy().argmax())
        self.token_ids.append(token)
        self.done_at = time.perf_counter()
        if len(self.token_ids) == 1:
            self.first_token_at = self.done_at
        if token in self.request.stop_token_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.request.max_new_tokens:
            self.finish_reason = "length"
        return token

    def keep(self, trace: LogitsTrace) -> None:
        """Keep what a record holds of the logits that the last token was chosen from.

        Raises:
            NonFiniteLogits: there is NaN or infinity among them.
        """
        if not trace.finite:
            raise NonFiniteLogits(
                f"request {self.request.request_id}: NaN or infinity in the logits of new token "
                f"{len(self.token_ids) - 1}"
            )
        self.digests.append(trace.digest)
        self.margins.append(trace.top2_margin)

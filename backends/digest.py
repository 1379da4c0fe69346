"""What a record holds of the logits that a token was chosen from: a digest and the margin."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True)
class LogitsTrace:
    """What one row of logits leaves in the record.

    Attributes:
        digest: 16 hex digits, blake2b over the bytes of the row as float32; equal digests mean
            logits equal to the last bit.
        top2_margin: best minus second best logit; near zero means that the choice was a near tie.
        finite: whether the row holds neither NaN nor infinity.
    """

    digest: str
    top2_margin: float
    finite: bool


def trace_logits(logits: torch.Tensor) -> LogitsTrace:
    """Describe the logits that one token is chosen from.

    Args:
        logits: (vocab,), any float type, any device; at least two entries. Waits for the device.
    """
    row = logits.detach().to("cpu", torch.float32).contiguous()
    digest = hashlib.blake2b(row.numpy().data, digest_size=DIGEST_BYTES).hexdigest()
    best, second = row.topk(2).values.tolist()
    return LogitsTrace(digest, best - second, bool(row.isfinite().all()))

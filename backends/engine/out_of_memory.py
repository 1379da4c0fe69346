"""Whether an error says that memory ran out, and what it says in one line."""

from __future__ import annotations

import torch

from backends.base import RequestError


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether memory ran out; PyTorch's CPU and pinned allocators raise plain RuntimeErrors."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, RequestError):
        return False
    text = str(error).lower()
    return "out of memory" in text or "can't allocate memory" in text


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, else the name of its class."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

"""The prompt: text of a needle task, tokenised by the packaged probe, cut to an exact length."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from ruler_bench.tasks import DataSpec, generate, make_task
from ruler_bench.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TASK, TEXT_TOKENS, SEED = "niah_multikey_3", 8192, 42
DESCRIPTION = (
    f"the first sample of {TASK} at {TEXT_TOKENS} tokens, seed {SEED}, template base, tokenised "
    "by the packaged probe's tokenizer (its ids are below 4096), repeated from its start and cut "
    "to the exact length"
)


def prompt_maker() -> Callable[[int], tuple[int, ...]]:
    """Return what makes the prompt of so many tokens; the text is made and tokenised once.

    The task needs neither essays nor word lists, and none of its lines is like another.

    Raises:
        UsageError: the probe's tokenizer is missing.
    """
    tokenizer = load_tokenizer(str(ROOT / "ruler_bench" / "assets" / "probe"))
    parameters: Any = OmegaConf.to_container(
        OmegaConf.load(ROOT / "configs" / "task" / f"{TASK}.yaml")
    )
    task = make_task(parameters)
    sample = generate(DataSpec(task, TEXT_TOKENS, SEED, "base", tokenizer), 1)[0]
    token_ids = tuple(tokenizer.encode_prompt(sample.prompt))
    return lambda tokens: tuple(islice(cycle(token_ids), tokens))

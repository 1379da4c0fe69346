"""Records of engines that are made up: with leaks, with noise, with limits of their own."""

import hashlib
import random
import sys

import pytest

from ruler_bench.leak.arms import ENGINE_PER_SAMPLE, ONE_ENGINE, Arm
from ruler_bench.records import Record

OWN = {
    "architecture": "LlamaForCausalLM",
    "device": "cpu",
    "threads": 1,
    "dtype": "float32",
    "attention": "flash_cpu",
    "ops": "torch",
    "decode": "general kernels",
    "chunk_tokens": 1024,
    "attend_tokens": 512,
    "policy": {"name": "full"},
}
"""Settings in force, as our engine tells them."""
OTHER_PATH = {**OWN, "chunk_tokens": 512}


def number(ordinal):
    """The answer of a sample: seven digits that nobody guesses."""
    return str(random.Random(f"answer {ordinal}").randint(10**6, 10**7 - 1))


def prompt(ordinal):
    return f"One of the special magic numbers for key-{ordinal} is: {number(ordinal)}. What is it?"


def prompt_hash(ordinal):
    return hashlib.sha256(prompt(ordinal).encode()).hexdigest()


def prompts(count):
    return {prompt_hash(one): prompt(one) for one in range(count)}


def arm(name, settings=OWN, backend="offload"):
    lifetime = ENGINE_PER_SAMPLE if name.startswith("fresh") else ONE_ENGINE
    return Arm(name=name, lifetime=lifetime, backend=backend, settings=settings)


def answer(
    name, ordinal, text=None, *, position=None, margin=10.0, bits="same", tokens=True, **changes
):
    """An answer: by default right, with digests that follow from its tokens and from `bits`."""
    text = f" {number(ordinal)}." if text is None else text
    fresh = name.startswith("fresh")
    position = (0 if fresh else ordinal) if position is None else position
    ids = tuple(text.encode())
    margins = margin if isinstance(margin, (tuple, list)) else (margin,) * len(ids)
    correct = number(ordinal) in text
    values = {
        "arm": name,
        "step": ordinal,
        "ordinal": ordinal,
        "task": "niah_single_1",
        "length": 4096,
        "life": ordinal + 1 if fresh else 1,
        "position": position,
        "predecessor": position - 1 if position else None,
        "expected": (number(ordinal),),
        "depth": 0.5,
        "prompt_sha256": prompt_hash(ordinal),
        "prompt_tokens": 3968,
        "output": text,
        "output_tokens": ids if tokens else None,
        "top2_margin": tuple(margins) if tokens and margin is not None else None,
        "logits_digest": tuple(digest(ids, bits)) if tokens and bits else None,
        "finish_reason": "stop",
        "score": 100.0 if correct else 0.0,
        "correct": correct,
    }
    return Record(**{**values, **changes})


def digest(ids, bits):
    """One digest a token, of all tokens so far: as logits follow from what came before."""
    running = hashlib.sha256(str(bits).encode())
    for one in ids:
        running.update(bytes([one]))
        yield running.hexdigest()[:16]


def stream(name, count, **changes):
    return [answer(name, one, **changes) for one in range(count)]


def arms(*names, **settings):
    return {name: arm(name, settings.get(name, OWN)) for name in names}


@pytest.fixture(scope="session")
def made():
    """The functions of this module, which make records up."""
    return sys.modules[__name__]

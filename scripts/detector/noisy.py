"""A sound engine with noise, without a model: it leaks nothing, and is not always right.

The noise is the same in every request, whatever the engine has served before: a detector that
calls it a leak, a race or a fault of the engine raises a false alarm.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any, Literal

from backends.base import ConfigurationError, Generation, Request
from backends.oracle import answer_from_needles

NOISES = {
    "near_tie_flips": "a token of an answer, drawn anew each time, falls the other way",
    "near_tie_prompts": "some prompts have a near tie, which falls either way each time",
    "random_answers": "an answer, drawn anew each time, is seven random digits",
    "wrong_when_fresh": "some prompts are always answered wrongly, and there are near-tie flips",
    "kernel_by_life": "each engine takes one of two kernels, which round differently for its life",
    "rare_kernel_by_life": "likewise, and one engine in ten takes the other kernel",
}
"""Kinds of noise, and what each does."""
REVEALS = ("bits", "margins", "tokens", "text")
"""What the engine tells beside its text: tokens; their margins; digests of their logits."""
PATHS = ("own", "reference")
NEAR_TIE_LOGITS = {"float32": 0.005, "bfloat16": 0.05}
"""Largest margin of a near tie: a quarter of what rounding accounts for in that dtype."""
KERNELS = {"kernel_by_life": 0.5, "rare_kernel_by_life": 0.1}
"""Share of engines that take the other kernel, by the noise."""
ROUNDING_LOGITS = 0.001
WRONG_SHARE = 0.3


class NoisyEngine:
    """Answers from the prompt, with noise."""

    def __init__(
        self,
        *,
        noise: str,
        rate: float,
        rounding: float = 0.0,
        reveals: str = "bits",
        dtype: Literal["float32", "bfloat16"] = "float32",
        path: str = "own",
        wrong: Literal["alike", "otherwise"] = "alike",
        seed: int = 0,
        life: str | None = None,
    ) -> None:
        """Choose the noise.

        Args:
            noise: one of NOISES.
            rate: share of answers that it changes, 0 to 1.
            rounding: share of answers whose logits have other bits and the same tokens.
            reveals: one of REVEALS.
            dtype: said to be computed in.
            path: "own", or "reference": other bits, margins that differ by rounding.
            wrong: of wrong_when_fresh: whether both paths give the same wrong answer.
            seed: decides which prompts are answered wrongly or have a near tie.
            life: with it the noise is repeatable; None draws it anew for each engine.

        Raises:
            ConfigurationError: a value is not allowed.
        """
        for key, value, allowed in (
            ("noise", noise, tuple(NOISES)),
            ("reveals", reveals, REVEALS),
            ("path", path, PATHS),
            ("dtype", dtype, tuple(NEAR_TIE_LOGITS)),
        ):
            if value not in allowed:
                raise ConfigurationError(
                    f"backend.{key}={value}: unknown. Allowed: {', '.join(allowed)}."
                )
        for key, share in (("rate", rate), ("rounding", rounding)):
            if not 0 <= share <= 1:
                raise ConfigurationError(f"backend.{key}={share}: must be a share, 0 to 1.")
        self._settings = {
            "noise": noise,
            "rate": rate,
            "rounding": rounding,
            "reveals": reveals,
            "dtype": dtype,
            "path": path,
            "wrong": wrong,
            "seed": seed,
        }
        self._noise, self._rate, self._rounding = noise, rate, rounding
        self._reveals, self._path, self._wrong, self._seed = reveals, path, wrong, seed
        self._near_tie = NEAR_TIE_LOGITS[dtype]
        self._random = random.Random(None if life is None else f"{seed} {life}")
        self._kernel = int(self._random.random() < KERNELS.get(noise, 0.0))

    def generate(self, request: Request) -> Generation:
        """Answer one request.

        Raises:
            RequestError: the prompt is of no needle task.
        """
        text = answer_from_needles(request.prompt) + "."
        text = self._always_wrong(request.prompt, text)
        if self._noise == "random_answers" and self._random.random() < self._rate:
            return self._told(request.prompt, f" {self._random.randint(10**6, 10**7 - 1)}.", None)
        if (place := self._tie(request.prompt, text)) is not None:
            drawn = self._of_prompt(f"runner-up {place}", request.prompt)
            other = str((int(text[place]) + drawn.randint(1, 9)) % 10)
            flipped = text[:place] + other + text[place + 1 :]
            rounds = self._noise not in KERNELS
            return self._told(request.prompt, flipped, place, rounds)
        return self._told(request.prompt, text, self._place_of_tie(request.prompt, text))

    def _of_prompt(self, purpose: str, prompt: str) -> random.Random:
        return random.Random(f"{purpose} {self._seed} {prompt}")

    def _always_wrong(self, prompt: str, text: str) -> str:
        if self._noise != "wrong_when_fresh":
            return text
        drawn = self._of_prompt("wrong", prompt)
        if drawn.random() >= WRONG_SHARE:
            return text
        if self._path == "reference" and self._wrong == "otherwise":
            drawn = self._of_prompt("otherwise", prompt)
        return f" {drawn.randint(10**6, 10**7 - 1)}."

    def _place_of_tie(self, prompt: str, text: str) -> int | None:
        """Return where a prompt's own near tie is, or None where it has none."""
        if self._noise not in ("near_tie_prompts", *KERNELS):
            return None
        drawn = self._of_prompt("tie", prompt)
        # Half of the answers to such a prompt fall the other way.
        return drawn.choice(_digits(text)) if drawn.random() < 2 * self._rate else None

    def _tie(self, prompt: str, text: str) -> int | None:
        """Return the character that falls the other way this time, or None."""
        own = self._place_of_tie(prompt, text)
        if self._noise in KERNELS:
            return own if self._kernel else None
        if own is not None:
            return own if self._random.random() < 1 / 2 else None
        flips = self._noise in ("near_tie_flips", "wrong_when_fresh")
        if flips and self._random.random() < self._rate:
            return self._random.choice(_digits(text))
        return None

    def _told(self, prompt: str, text: str, tie: int | None, rounds: bool = False) -> Generation:
        """Return the answer with as much about it as this engine tells."""
        ids = tuple(text.encode())
        rounds = rounds or self._random.random() < self._rounding
        salt = f"{self._path} {self._kernel} {self._random.random() if rounds else ''}"
        levels = REVEALS[: REVEALS.index(self._reveals) + 1]
        has_tokens, has_margins = "text" not in levels, self._reveals in ("bits", "margins")
        return Generation(
            text=text,
            finish_reason="stop",
            token_ids=ids if has_tokens else None,
            top2_margin=self._margins(prompt, ids, tie, salt) if has_margins else None,
            logits_digest=_digests(prompt, ids, salt) if self._reveals == "bits" else None,
        )

    def _margins(
        self, prompt: str, ids: Sequence[int], tie: int | None, salt: str
    ) -> tuple[float, ...]:
        plain = self._of_prompt("margins", prompt)
        rounding = random.Random(f"rounding {salt} {prompt}")
        found = [
            plain.uniform(2.0, 12.0) + rounding.uniform(-ROUNDING_LOGITS, ROUNDING_LOGITS)
            for _ in ids
        ]
        if tie is not None:
            found[tie] = self._random.uniform(0.0, self._near_tie)
        return tuple(found)

    def describe(self) -> dict[str, Any]:
        """Return the settings in force."""
        return dict(self._settings)

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


def _digits(text: str) -> list[int]:
    return [place for place, one in enumerate(text) if one.isdigit()]


def _digests(prompt: str, ids: Sequence[int], salt: str) -> tuple[str, ...]:
    """Return a digest a token, of the prompt and all tokens so far, as logits follow from them."""
    running = hashlib.sha256(f"{salt} {prompt}".encode())
    found = []
    for one in ids:
        found.append(running.hexdigest()[:16])
        running.update(bytes([one]))
    return tuple(found)

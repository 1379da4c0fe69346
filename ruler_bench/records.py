"""Record: one finished sample; one JSON object a line of records.jsonl."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Record:
    """One sample in one arm, finished or failed. None means that the backend cannot tell.

    Attributes:
        arm: name of the stream, such as persistent.
        step: place in the arm's stream; (arm, step) is the key and the last line for a key wins.
        ordinal: number of the sample within its task.
        task: name of the task.
        length: tokens of prompt and generation together, as asked for.
        life: how many engines this arm has started, this one included.
        position: requests this engine had served before.
        predecessor: ordinal of the request before, None for the first of a life.
        expected: the reference answers.
        depth: place of the first needle asked for, 0 to 1.
        prompt_sha256: hash of the prompt's UTF-8 text.
        prompt_tokens: tokens the engine saw, BOS included.
        output: generated text without special tokens.
        output_tokens: generated ids, end-of-text included.
        logits_digest: a hex digest a generated token.
        top2_margin: best minus second best logit, one a generated token.
        finish_reason: "stop" or "length".
        score: 0 to 100 by the task's rule; None where the sample failed in the engine.
        correct: score == 100.
        error: what failed in the engine, on one line.
        ttft_seconds, decode_seconds: to the first token, and from there to the last.
        bytes_up, bytes_down: KV bytes copied to the device and from it.
        peak_device_bytes: peak device memory; on a CPU the cache's own buffers.
        kernel: the attention kernel that ran.
        density: share of causal key blocks computed, for sparse prefill.
    """

    arm: str
    step: int
    ordinal: int
    task: str
    length: int
    life: int
    position: int
    predecessor: int | None
    expected: tuple[str, ...]
    depth: float | None
    prompt_sha256: str
    prompt_tokens: int
    output: str | None = None
    output_tokens: tuple[int, ...] | None = None
    logits_digest: tuple[str, ...] | None = None
    top2_margin: tuple[float, ...] | None = None
    finish_reason: str | None = None
    score: float | None = None
    correct: bool | None = None
    error: str | None = None
    ttft_seconds: float | None = None
    decode_seconds: float | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None
    peak_device_bytes: int | None = None
    kernel: str | None = None
    density: float | None = None

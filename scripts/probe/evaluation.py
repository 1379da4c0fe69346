"""Greedy answers to real prompts in batches, scored by RULER's rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from tokenizers import Tokenizer
from torch import Tensor

from scripts.probe.model import Attention, Layer, Probe, _by_head
from scripts.probe.prompts import Prompt


@torch.inference_mode()
def greedy(
    model: Probe, prompts: Sequence[Sequence[int]], attention: Attention, max_new_tokens: int
) -> list[list[int]]:
    """Continue prompts greedily with a key/value cache, each until its end of text.

    Args:
        model: the probe.
        prompts: token ids; shorter ones are padded behind, which causal attention never sees.
        attention: causal attention for the prompts.
        max_new_tokens: limit for each answer.

    Returns:
        New tokens of each prompt, without the end of text.
    """
    device = model.embedding.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    rows, longest = len(prompts), int(lengths.max())
    tokens = torch.full((rows, longest), model.config.pad, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt, device=device)

    cache: list[tuple[Tensor, Tensor]] = []
    x = torch.nn.functional.embedding(tokens.reshape(-1), model.embedding).to(model.compute_dtype)
    positions = torch.arange(longest, device=device).repeat(rows)
    cos, sin = model.rotations_at(positions)
    room = (0, 0, 0, max_new_tokens)
    for layer in model.blocks():
        q, k, v = (_by_head(t, rows, longest) for t in model.project(layer, x, cos, sin))
        cache.append((torch.nn.functional.pad(k, room), torch.nn.functional.pad(v, room)))
        mixed = attention(q, k, v).transpose(1, 2).reshape(rows * longest, -1)
        x = model.merge(layer, x, mixed)
    last = x.view(rows, longest, -1)[torch.arange(rows, device=device), lengths - 1]

    answers: list[Tensor] = []
    done = torch.zeros(rows, dtype=torch.bool, device=device)
    places = torch.arange(longest + max_new_tokens, device=device)
    for step in range(max_new_tokens):
        best = model.logits(last).argmax(-1)
        done |= best == model.config.end_of_text
        answers.append(torch.where(done, model.config.end_of_text, best))
        if bool(done.all()):
            break
        at = lengths + step
        visible = (places <= at[:, None])[:, None, None]
        last = _decode(model, best, at, visible, cache)
    found = torch.stack(answers, dim=1).tolist()
    return [[token for token in row if token != model.config.end_of_text] for row in found]


def _decode(
    model: Probe, tokens: Tensor, at: Tensor, visible: Tensor, cache: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """Run one token of each row at its own position; returns the last layer's output."""
    rows = torch.arange(len(tokens), device=tokens.device)
    cos, sin = model.rotations_at(at)
    x = torch.nn.functional.embedding(tokens, model.embedding).to(model.compute_dtype)
    blocks: list[Layer] = list(model.blocks())
    for layer, (keys, values) in zip(blocks, cache, strict=True):
        q, k, v = model.project(layer, x, cos, sin)
        keys[rows, :, at], values[rows, :, at] = k, v
        mixed = torch.nn.functional.scaled_dot_product_attention(
            q[:, :, None], keys, values, attn_mask=visible, enable_gqa=True
        )
        x = model.merge(layer, x, mixed.reshape(len(tokens), -1))
    return x


def score(text: str, outputs: Sequence[str]) -> float:
    """Return RULER's score: the share of the answers that stand in the text, in any order."""
    return sum(output.lower() in text.lower() for output in outputs) / len(outputs)


def evaluate(
    model: Probe,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    *,
    attention: Attention,
    batch_tokens: int,
    out_of_time: Callable[[], bool],
) -> dict[tuple[str, int], list[float]]:
    """Answer prompts and score them.

    Args:
        model: the probe.
        tokenizer: turns answers into text.
        prompts: of any tasks and lengths.
        attention: causal attention.
        batch_tokens: prompt tokens of a batch at most, if more than one prompt fits.
        out_of_time: asked before each batch; what is left is then left out.

    Returns:
        Scores, 0 to 1 a sample, by task and length.
    """
    scores: dict[tuple[str, int], list[float]] = {}
    model.eval()
    for length, group in groupby(sorted(prompts, key=lambda p: p.length), lambda p: p.length):
        same = list(group)
        size = max(1, batch_tokens // length)
        for start in range(0, len(same), size):
            if out_of_time():
                return scores
            batch = same[start : start + size]
            limit = max(prompt.tokens_to_generate for prompt in batch)
            answers = greedy(model, [p.tokens.tolist() for p in batch], attention, limit)
            for prompt, answer in zip(batch, answers, strict=True):
                cell = scores.setdefault((prompt.task, length), [])
                text = tokenizer.decode(answer[: prompt.tokens_to_generate])
                cell.append(score(text, prompt.outputs))
    return scores


def table(scores: dict[tuple[str, int], list[float]]) -> str:
    """Return a Markdown table: mean score of 100 and, in brackets, samples wholly right."""
    tasks = list(dict.fromkeys(task for task, _ in scores))
    lengths = sorted({length for _, length in scores})
    lines = [
        "| tokens | " + " | ".join(task.removeprefix("niah_") for task in tasks) + " |",
        "|---" * (len(tasks) + 1) + "|",
    ]
    for length in lengths:
        cells = []
        for task in tasks:
            cell = scores.get((task, length), [])
            right = sum(value == 1 for value in cell)
            mean = 100 * sum(cell) / max(1, len(cell))
            cells.append(f"{mean:.1f} ({right}/{len(cell)})")
        lines.append(f"| {length} | " + " | ".join(cells) + " |")
    return "\n".join(lines)

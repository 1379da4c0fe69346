"""What has to be done for an answer, counted from the shape alone: operations and bytes.

One multiply and add are two operations. "Needed" counts what one next-token answer needs: in the
last layer only keys and values of all rows, everything else there and the head for the last row
alone. "All rows" counts every layer whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from scripts.bench.shapes import Shape

ATTENTION = "attention"
HEAD = "head"


def causal_operations(shape: Shape, tokens: int) -> float:
    """Return the operations of causal attention to `tokens` tokens in one layer.

    Two products, over the tokens * (tokens + 1) / 2 pairs that are not masked.
    """
    return 2.0 * shape.heads * shape.head_dim * tokens * (tokens + 1)


def rectangular_operations(shape: Shape, queries: int, keys: int) -> float:
    """Return the operations of `queries` queries that see all of `keys` keys in one layer."""
    return 4.0 * shape.heads * shape.head_dim * queries * keys


def prefill_operations(shape: Shape, tokens: int, *, all_rows: bool = False) -> dict[str, float]:
    """Return the operations of a prefill by what runs them: the four products, attention, head.

    Args:
        shape: of the model.
        tokens: of the prompt.
        all_rows: count the last layer whole; otherwise what one next-token answer needs.
    """
    operations = {
        product.name: 2.0 * product.inputs * product.outputs * tokens * shape.layers
        for product in shape.products
    }
    operations[ATTENTION] = causal_operations(shape, tokens) * shape.layers
    operations[HEAD] = 2.0 * shape.hidden * shape.vocabulary
    if all_rows:
        return operations
    spared_rows = tokens - 1
    for product in shape.products:
        outputs = product.outputs
        if product.name == "qkv":
            outputs -= 2 * shape.kv_width
        operations[product.name] -= 2.0 * product.inputs * outputs * spared_rows
    operations[ATTENTION] -= causal_operations(shape, tokens)
    operations[ATTENTION] += rectangular_operations(shape, 1, tokens)
    return operations


def seconds_at(operations: Mapping[str, float], rates: Mapping[str, float]) -> float | None:
    """Return the least time for these operations, at rates by the same names in operations/s.

    The head counts at the best of the rates of the products. None where a rate is not known.
    """
    products = [rates[name] for name in operations if name in rates and name != ATTENTION]
    known = dict(rates) | ({HEAD: max(products)} if products else {})
    if not all(name in known for name in operations):
        return None
    return sum(count / known[name] for name, count in operations.items())


def kv_bytes(shape: Shape, tokens: int, element_bytes: int) -> int:
    """Return the bytes of the keys and values of `tokens` tokens in all layers."""
    return 2 * shape.layers * shape.kv_width * tokens * element_bytes


def decode_weight_bytes(shape: Shape, element_bytes: int) -> int:
    """Return the bytes of weights that one decoded token reads: all but the embedding's table."""
    sizes = shape.weight_shapes()
    numbers = 0
    for name, size in sizes.items():
        if name != "model.embed_tokens.weight":
            numbers += size[0] * (size[1] if len(size) == 2 else 1)
    return numbers * element_bytes


def weight_bytes(shape: Shape, element_bytes: int) -> int:
    """Return the bytes of all weights."""
    table = shape.vocabulary * shape.hidden * element_bytes
    return decode_weight_bytes(shape, element_bytes) + table


class Copies(NamedTuple):
    """Bytes of keys and values that one request moves to the device and from it."""

    up_bytes: int
    down_bytes: int


def expected_copies(
    shape: Shape, tokens: int, new_tokens: int, chunk_tokens: int | None, element_bytes: int
) -> Copies:
    """Return the copies of a request whose keys and values all lie in CPU memory.

    Down: the prompt, once. Up in prefill: before each chunk the tokens of the earlier ones, in
    every layer; in the last layer only before the chunk with the last token, the only one whose
    queries matter there. Up in decode: the whole prompt for each token. What was decoded may stay
    on the device, and what a ring keeps need not come again: an engine may copy less than this.

    Args:
        shape: of the model.
        tokens: of the prompt.
        new_tokens: generated, the first of them by the prefill.
        chunk_tokens: of a prefill step; None is the whole prompt at once.
        element_bytes: of a number in the cache.
    """
    prompt = kv_bytes(shape, tokens, element_bytes)
    per_token_layer = kv_bytes(shape, 1, element_bytes) // shape.layers
    starts = range(0, tokens, chunk_tokens or tokens)
    earlier_tokens = sum(starts) * (shape.layers - 1) + starts[-1]
    return Copies(
        up_bytes=earlier_tokens * per_token_layer + (new_tokens - 1) * prompt, down_bytes=prompt
    )

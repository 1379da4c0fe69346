"""The table of made-up rows, whose shares and ratios are worked out by hand."""

import pytest

from scripts.bench.shapes import SHAPES
from scripts.bench.table import Figures, render

TINY = SHAPES["tiny"]
KV_BYTES = 2 * 3 * 2 * 16 * 2  # of a token in bfloat16
SETTINGS = {
    "shape": "tiny",
    "dtype": "bfloat16",
    "seed": 0,
    "device": "a device",
    "platform": "Linux",
    "versions": {"torch": "1"},
    "prompt": "text",
}
MANIFEST = {"settings": SETTINGS, "runs": [{"started": "today", "command": "bench"}]}


def ceiling(name, settings=None, **figures):
    return {
        "key": f"{name} {settings}",
        "kind": "ceiling",
        "name": name,
        "length": None,
        "settings": settings or {},
        "figures": figures,
        "error": None,
    }


def gemm(product, rows, rate):
    return ceiling("gemm", {"product": product, "rows": rows}, operations_per_second=rate)


def attention(kernel, keys, rate, causal=True):
    settings = {"kernel": kernel, "queries": keys, "keys": keys, "causal": causal}
    return ceiling("attention", settings, operations_per_second=rate)


def prompt(name, length, prefill, decode, settings=None, **figures):
    ours = {
        "over_weights_bytes": 2**30,
        "planned_bytes": {"over_weights_bytes": 3 * 2**29, "host_bytes": 0},
        "logits_digest": ["a", "b"],
        "repeats_equal": True,
        "kernel": "k",
        "chunk_tokens": None,
        "attend_tokens": None,
    }
    return {
        "key": f"{name} {length} {settings}",
        "kind": "prompt",
        "name": name,
        "run": 0,
        "length": length,
        "settings": settings or {},
        "error": None,
        "figures": {
            "prefill_seconds": prefill,
            "decode_seconds": decode,
            "all_prefill_seconds": [prefill, prefill],
            "new_tokens": 2,
            "construct_seconds": 3.0,
            "token_ids": [5, 6],
        }
        | (ours if "transformers" not in name else {})
        | figures,
    }


CHUNKED = {"chunk_tokens": 32, "kvcache_block_size": 64, "num_gpu_blocks": 4}
CEILINGS = [
    ceiling("copy", up_bytes_per_second=KV_BYTES * 100.0, down_bytes_per_second=1.0),
    ceiling("memory", copy_bytes_per_second=5.0, best_bytes_per_second=1e6),
    *(gemm(product.name, 64, 1e6) for product in TINY.products),
    *(gemm(product.name, 32, 1e5) for product in TINY.products),
    attention("slow", 100, 1e5),
    attention("fast", 100, 2e6),
    attention("rectangle", 100, 9e9, causal=False),
    attention("fast", 50, 1e6),
]
ROWS = [
    *CEILINGS,
    prompt("transformers", 100, 50.0, 30.0),
    prompt("transformers_offloaded", 100, 60.0, 40.0),
    prompt("gpu_only", 100, 40.0, 10.0),
    prompt(
        "offload_layerwise",
        100,
        32.0,
        2.0,
        up_bytes=50,
        expected_up_bytes=100,
        decode_up_bytes=KV_BYTES * 75,
    ),
    prompt("offload_chunked", 100, 80.0, 4.0, CHUNKED, chunk_tokens=32, attend_tokens=64),
]


def figures_of(rows):
    return Figures(SETTINGS, {row["key"]: row for row in rows})


def document(rows, manifest=MANIFEST):
    return render(manifest, {row["key"]: row for row in rows})


def cells_of(text, first):
    """Return the cells after the first of the one line that starts with `first`."""
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    found = [cells for cells in lines if cells[0] == first]
    assert len(found) == 1, found
    return found[0][1:]


def compute_limit(tokens):
    """In operations at 1e6/s for products and 2e6/s for attention, written out."""
    parameters = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 160
    products = 2 * tokens * 2 * parameters  # two of three layers whole
    products += 2 * tokens * 64 * 2 * 32  # keys and values of the last
    products += 2 * (parameters - 64 * 2 * 32) + 2 * 64 * 4096  # its last row, and the head
    pairs = 2 * tokens * (tokens + 1) / 2 + tokens
    return products / 1e6 + 4 * 64 * pairs / 2e6


def test_shares_and_ratios_are_those_worked_out_by_hand():
    text = document(ROWS)
    limit = compute_limit(100)
    assert figures_of(ROWS).prefill_limit(100) == pytest.approx(limit)
    prefill = cells_of(text, "gpu_only: prefill")
    assert prefill[0] == "40.000 s"
    assert prefill[1] == f"{100 / 40:,.0f}"
    assert prefill[3] == f"{limit / 40:.3f}"
    assert prefill[5] == "1.250x transformers"
    layerwise = cells_of(text, "offload_layerwise: prefill")
    assert layerwise[5] == "1.250x gpu_only"
    assert layerwise[6] == "1.000 (1.500)"
    assert layerwise[7] == "0.000 (0.500)"
    # 100 tokens' KV at 100 tokens' KV a second: one second a token.
    decode = cells_of(text, "offload_layerwise: decode, a token")
    assert decode[2:4] == ["1.000 s (copy)", "0.500"]
    assert decode[7] == "0.000 (0.750)"
    assert decode[5] == "20.000x transformers_offloaded"
    weights = (3 * (64 * 128 + 64 * 64 + 3 * 64 * 160 + 2 * 64) + 64 + 64 * 4096) * 2
    memory_limit = (weights + KV_BYTES * 101) / 1e6
    ratio = cells_of(text, "gpu_only decode, times the memory limit")
    assert ratio == [f"{10 / memory_limit:.3f}"]
    share = cells_of(text, "offload_chunked prefill, share of the compute limit")
    assert share == [f"{limit / 80:.3f}"]
    assert cells_of(text, "offload_layerwise logits, bit for bit those of gpu_only") == [
        "2 of 2 equal"
    ]


def test_other_bits_and_settings_are_said():
    name = "offload_layerwise logits, bit for bit those of gpu_only"
    resident = prompt("gpu_only", 100, 1.0, None)
    other_bits = prompt("offload_layerwise", 100, 1.0, None, logits_digest=["a", "x"])
    assert cells_of(document([resident, other_bits]), name) == ["1 of 2 equal"]
    other_kernel = prompt("offload_layerwise", 100, 1.0, None, kernel="other")
    assert "not promised" in cells_of(document([resident, other_kernel]), name)[0]
    shaky = prompt("gpu_only", 100, 1.0, None, repeats_equal=False)
    assert cells_of(document([shaky]), "gpu_only, all repeats equal bit for bit") == ["NO"]


def test_without_ceilings_there_are_times_and_no_shares():
    text = document([prompt("gpu_only", 100, 40.0, 10.0)])
    assert cells_of(text, "gpu_only: prefill")[2:5] == ["-", "-", "-"]
    assert "Compute limit" not in text
    assert "None was measured." in text


def test_the_attention_of_the_longest_measured_length_below_counts():
    figures = figures_of(ROWS)
    assert figures.rates(120)["attention"] == figures.rates(100)["attention"] == 2e6
    assert figures.rates(60)["attention"] == 1e6
    assert figures.prefill_limit(49) is None
    text = document([*CEILINGS, prompt("gpu_only", 120, 1.0, None)])
    assert "with the attention rate measured at 100 tokens" in text


def test_a_capped_row_stands_beside_the_others_and_is_not_compared_with():
    capped = prompt("offload_chunked", 100, 8.0, 1.0, CHUNKED | {"device_memory_gb": 24.0})
    text = document([*ROWS, capped])
    name = "offload_chunked (chunk 32, block 64, 4 slots)"
    assert cells_of(text, f"{name}: prefill")[0] == "80.000 s"
    assert cells_of(text, f"{name} within 24 GiB: prefill")[0] == "8.000 s"
    share = cells_of(text, "offload_chunked prefill, share of the compute limit")
    assert share == [f"{compute_limit(100) / 80:.3f}"]


def test_kernels_left_out_are_listed_with_their_reasons():
    runs = [MANIFEST["runs"][0] | {"kernels_left_out": {"fa3": "it is not installed"}}]
    assert "- it is not installed" in document(ROWS, MANIFEST | {"runs": runs})


def test_rows_of_several_runs_are_said_to_be():
    assert "runs of the command" not in document(ROWS)
    later = prompt("gpu_only", 100, 1.0, None) | {"run": 1}
    assert "come from 2 runs" in document([*ROWS, later | {"key": "another"}])


def test_failed_rows_are_listed():
    failed = prompt("gpu_only", 100, 1.0, 1.0) | {"figures": {}, "error": "OutOfMemory: a|b"}
    text = document([failed])
    assert "## Not measured" in text
    assert "OutOfMemory: a&#124;b" in text
    assert "No row was measured." in text

"""`python -m ruler_bench.divergence`: two recordings of one computation, one of them disturbed."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.engine import checkpoint
from backends.engine.checkpoint import CheckpointWriter
from ruler_bench.command_line import USAGE_ERROR
from ruler_bench.divergence import NAMES, compare, read_recording, recording
from ruler_bench.divergence.__main__ import DIFFERENT, SAME, main
from ruler_bench.divergence.comparison import row_differences

LAYERS, TOKENS, WIDTH = 3, 10, 4
PER_LAYER = ("query", "key", "value", "attention", "hidden")
PLACES = [
    ("rotation", -1),
    *((name, layer) for layer in range(LAYERS) for name in PER_LAYER),
    ("logits", LAYERS),
]
"""Names and layers in the order of computation."""


def rows_of(request_id, name, layer, dtype=torch.float32):
    """Rows of a request: the same in every run."""
    seed = 1000 * request_id + 10 * (layer + 1) + NAMES.index(name)
    generator = torch.Generator().manual_seed(0 if name == "rotation" else seed)
    return torch.randn(TOKENS, WIDTH, generator=generator).to(dtype)


def record(
    folder,
    *,
    cuts=(0, 4, 8, TOKENS),
    change=None,
    tensors=False,
    requests=(0,),
    prompt=(1, 2, 3),
    dtype=torch.float32,
    run_settings=None,
    names=NAMES,
):
    """Record requests in the order of a real engine.

    Args:
        cuts: where chunks start, and the end.
        change: {(request, name, layer, position): what is added to the row's first value}.
    """
    writer = CheckpointWriter(folder, tensors=tensors)
    for request_id in requests:
        writer.begin(request_id, prompt, run_settings or {})
        for chunk, (start, stop) in enumerate(itertools.pairwise(cuts)):
            for name, layer in PLACES:
                if name not in names:
                    continue
                rows = rows_of(request_id, name, layer, dtype)
                for (other, *place, position), amount in (change or {}).items():
                    if (other, *place) == (request_id, name, layer):
                        rows[position, 0] += amount
                first = TOKENS - 1 if name == "logits" else start
                writer.record(name, layer, chunk, max(start, first), rows[max(start, first) : stop])
        writer.end()
    return folder


@pytest.fixture
def divergence_of(cli):
    """Call the command and return its status and lines; on wrong usage the one line it says."""

    def call(*arguments):
        finished = cli(*map(str, arguments), entry=main)
        if finished.status == USAGE_ERROR:
            assert finished.out == ""
            assert len(finished.err.splitlines()) == 1, finished.err
            return finished.status, finished.err
        assert finished.err == ""
        return finished.status, finished.out

    return call


def test_the_reader_knows_the_writers_format():
    for name in ("FORMAT", "FORMAT_VERSION", "MANIFEST", "TENSOR_NAME", "NAMES"):
        assert getattr(recording, name) == getattr(checkpoint, name)
    assert recording.DIGEST.itemsize == checkpoint.DIGEST_BYTES


@pytest.mark.parametrize("tensors", [False, True])
def test_equal_runs(divergence_of, tmp_path, tensors):
    for name in "ab":
        record(tmp_path / name, tensors=tensors, requests=(0, 1))
    status, said = divergence_of(tmp_path / "a", tmp_path / "b")
    rows = 2 * (len(PLACES) - 1) * TOKENS + 2
    assert (status, said) == (SAME, f"Nothing differs: {rows} rows of 2 requests compared.\n")


disturbances = st.sets(
    st.tuples(st.integers(0, 1), st.sampled_from(PLACES), st.integers(0, TOKENS - 1)).filter(
        lambda one: one[1][0] != "logits" or one[2] == TOKENS - 1
    ),
    min_size=1,
    max_size=6,
)
cuts = st.sets(st.integers(1, TOKENS - 1), max_size=4).map(lambda one: (0, *sorted(one), TOKENS))


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(changed=disturbances, cuts_a=cuts, cuts_b=cuts, tensors=st.booleans())
def test_the_first_difference_is_that_of_a_plain_search(
    tmp_path_factory, changed, cuts_a, cuts_b, tensors
):
    top = tmp_path_factory.mktemp("runs")
    change = {(request, *place, position): 1.0 for request, place, position in changed}
    record(top / "a", cuts=cuts_a, requests=(0, 1), tensors=tensors)
    record(top / "b", cuts=cuts_b, requests=(0, 1), tensors=tensors, change=change)
    # Walk through A as it was computed.
    first = next(
        (request, chunk, place, position)
        for request in (0, 1)
        for chunk, (start, stop) in enumerate(itertools.pairwise(cuts_a))
        for place in PLACES
        for position in range(start, stop)
        if (request, *place, position) in change
    )
    request, chunk, place, position = first
    recordings = [read_recording(top / name, request) for name in "ab"]
    comparison = compare(*recordings)
    key, found = comparison.first()
    assert key == place
    assert found.positions[0] == position
    assert recordings[0].records[found.owners_a[0]].chunk == chunk
    other = recordings[1].records[found.owners_b[0]]
    assert cuts_b[other.chunk] <= position < cuts_b[other.chunk + 1]
    for key, found in comparison.compared.items():
        wanted = sorted(
            position for one, place, position in changed if (one, place) == (request, key)
        )
        assert found.positions.tolist() == wanted
        if tensors:
            size = rows_of(request, *key)[wanted].double()
            assert found.absolute == pytest.approx([1.0] * len(wanted), rel=1e-6)
            moved = size.clone()
            moved[:, 0] += 1
            scale = torch.maximum(size.abs().amax(1), moved.abs().amax(1))
            assert found.relative == pytest.approx((1 / scale).tolist(), rel=1e-6)


def test_what_is_said_of_equal_cuts(divergence_of, tmp_path):
    record(tmp_path / "a", requests=(0, 3))
    record(
        tmp_path / "b",
        requests=(0, 3),
        change={(3, "attention", 1, 5): 1e-3, (3, "hidden", 1, 5): 1.0, (3, "query", 2, 4): 1.0},
    )
    status, said = divergence_of(tmp_path / "a", tmp_path / "b")
    assert status == DIFFERENT
    assert said.splitlines() == [
        "First difference: request 3, chunk 1 (positions 4 to 7), layer 1, attention, position 5.",
        "By how much: bits differ; store tensors with backend.checkpoint_tensors=true to see by "
        "how much.",
        "Rows that differ in request 3:",
        "layer       compared    differ    query    key    value    attention    hidden",
        "rotation          10         0        -      -        -            -         -",
        "0                 50         0        0      0        0            0         0",
        "1                 50         2        0      0        0            1         1",
        "2                 50         1        1      0        0            0         0",
        "logits             1         0        -      -        -            -         -",
        "Requests that differ: 3 (322 rows of 2 requests compared).",
    ]


def test_what_is_said_of_other_cuts(divergence_of, tmp_path):
    change = {(0, "key", 0, 6): 0.5}
    for name, cut, disturbed in (("a", 5, None), ("b", 3, change)):
        record(
            tmp_path / name,
            cuts=(0, cut, TOKENS),
            change=disturbed,
            tensors=True,
            run_settings={"chunk_tokens": cut, "checkpoint": name, "memory_plan": {"of": cut}},
        )
    status, said = divergence_of(tmp_path / "a", tmp_path / "b")
    assert status == DIFFERENT
    first, second, third, *_ = said.splitlines()
    assert first == "Settings that differ: chunk_tokens=5 in A, 3 in B."
    assert second == (
        "First difference: request 0, chunk 1 (positions 5 to 9) in A and chunk 1 (positions 3 to "
        "9) in B, layer 0, key, position 6."
    )
    size = rows_of(0, "key", 0)[6]
    largest = max(size.abs().max(), abs(size[0] + 0.5)).item()
    assert third == (
        f"By how much there: 0.5 absolute, {0.5 / largest:.3g} relative; at most, in layer 0, key: "
        f"0.5 absolute, {0.5 / largest:.3g} relative."
    )
    assert "max relative" in said


def test_rotation_alone_may_be_compared_whatever_else_differs(divergence_of, tmp_path):
    record(tmp_path / "a", cuts=(0, 5, TOKENS), prompt=(1, 2))
    change = {(0, "query", 0, 1): 1.0}
    record(tmp_path / "b", cuts=(0, 2, 3, TOKENS), prompt=(3,), change=change)
    status, said = divergence_of(tmp_path / "a", tmp_path / "b", "--only", "rotation")
    assert (status, said) == (SAME, "Nothing differs: 10 rows of 1 request compared.\n")

    record(tmp_path / "c", cuts=(0, 2, TOKENS), change={(0, "rotation", -1, 7): 1e-6})
    status, said = divergence_of(tmp_path / "a", tmp_path / "c", "--only", "rotation")
    assert status == DIFFERENT
    assert "chunk 1 (positions 5 to 9) in A and chunk 1 (positions 2 to 9) in B, rotation, " in said
    assert "position 7." in said


def test_tolerance_passes_over_small_differences_only(divergence_of, tmp_path):
    record(tmp_path / "a", tensors=True)
    change = {(0, "hidden", 0, 2): 1e-5, (0, "key", 2, 9): 1.0}
    record(tmp_path / "b", tensors=True, change=change)
    pair = (tmp_path / "a", tmp_path / "b", "--tolerance")
    status, said = divergence_of(*pair, "1e-7")
    assert "layer 0, hidden, position 2." in said
    status, said = divergence_of(*pair, "1e-3")
    assert status == DIFFERENT
    assert "layer 2, key, position 9." in said
    assert "Passed over: 1 row, different by no more than 0.001 relative." in said
    status, said = divergence_of(*pair, "1e-3", "--only", "hidden", "query")
    assert status == SAME


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_measured(tmp_path, dtype, divergence_of):
    record(tmp_path / "a", tensors=True, dtype=dtype)
    record(tmp_path / "b", tensors=True, dtype=dtype, change={(0, "value", 1, 3): 0.5})
    recordings = [read_recording(tmp_path / name, 0) for name in "ab"]
    (absolute,) = compare(*recordings).compared["value", 1].absolute
    before = rows_of(0, "value", 1, dtype)[3, 0]
    assert absolute == ((before + 0.5).double() - before.double()).abs()

    record(tmp_path / "c", tensors=True)
    _, said = divergence_of(tmp_path / "a", tmp_path / "c")
    name = str(dtype).removeprefix("torch.")
    assert f"A and B are of different dtypes: {' and '.join(sorted((name, 'float32')))}." in said


def test_what_only_one_run_has_is_counted(divergence_of, tmp_path):
    record(tmp_path / "a", requests=(0, 1, 2, 5))
    record(tmp_path / "b", cuts=(0, 4, 8), requests=(0, 1), names=("query", "key"))
    status, said = divergence_of(tmp_path / "a", tmp_path / "b")
    assert status == SAME
    assert said.splitlines() == [
        "Nothing differs: 96 rows of 2 requests compared.",
        "Not compared: 226 rows that only one run recorded.",
        "Not compared: only A has request 2, 5.",
    ]
    status, said = divergence_of(tmp_path / "a", tmp_path / "b", "--request", "1")
    assert said.splitlines()[0] == "Nothing differs: 48 rows of 1 request compared."


def test_a_recording_cut_short_is_read_as_far_as_it_goes(divergence_of, tmp_path):
    record(tmp_path / "a")
    record(tmp_path / "b", requests=(0, 1))
    index = tmp_path / "b" / "request_000000.jsonl"
    index.write_text("".join(index.read_text().splitlines(keepends=True)[:4]) + '{"name": "ke')
    (tmp_path / "b" / "request_000001.jsonl").write_text('{"requ')
    status, said = divergence_of(tmp_path / "a", tmp_path / "b")
    assert status == SAME
    assert said.splitlines()[0] == "Nothing differs: 12 rows of 1 request compared."
    assert said.splitlines()[-1] == "Cut short, as by a crash: request 0 in B."


finite = st.floats(-4, 4).map(lambda one: round(one * 4) / 4)
values = st.one_of(finite, st.sampled_from([math.inf, -math.inf, math.nan]))


@given(st.lists(st.tuples(values, values), min_size=1, max_size=5))
def test_row_differences_against_plain_arithmetic(pairs):
    gaps, sizes = [], [abs(one) for pair in pairs for one in pair if math.isfinite(one)]
    for one, other in pairs:
        if one == other or (math.isnan(one) and math.isnan(other)):
            gaps.append(0.0)
        else:
            gaps.append(abs(one - other) if math.isfinite(one - other) else math.inf)
    absolute, relative = row_differences(*(np.array([row]) for row in zip(*pairs, strict=True)))
    assert absolute.tolist() == [max(gaps)]
    if max(gaps) == 0:
        assert relative.tolist() == [0]
    else:
        scale = max(sizes, default=0.0)
        assert relative.tolist() == [max(gaps) / scale if scale else math.inf]


def test_values_equal_and_bits_not(divergence_of, tmp_path):
    for name, zero in (("a", 0.0), ("b", -0.0)):
        writer = CheckpointWriter(tmp_path / name, tensors=True)
        writer.begin(0, (1,), {})
        writer.record("key", 0, 0, 0, torch.full((1, 2), zero))
        writer.end()
    status, said = divergence_of(tmp_path / "a", tmp_path / "b")
    assert status == DIFFERENT
    assert "the values are equal, their bits are not." in said


# --- wrong usage --------------------------------------------------------------------------------


@pytest.fixture
def refusal(divergence_of, workdir):
    """Compare ./first with what is named, and return the one line that is said."""
    record(workdir / "first", requests=(0, 1, 2, 4))

    def call(*arguments):
        status, said = divergence_of(*arguments)
        assert status == USAGE_ERROR, said
        return said

    return call


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("first", "the following arguments are required: B; usage: "),
        ("first first --onyl key", "unrecognized arguments: --onyl key"),
        ("first first --only kye", "unknown name after --only 'kye'. Did you mean 'key'?"),
        ("first first --request 3", "--request=3: is not in first, which holds 0 to 2, 4."),
        ("first first --request -1", "--request=-1: must be the number of a request"),
        ("first first --request one", "--request=one: must be the number of a request"),
        ("first first --tolerance 2", "--tolerance=2: must be a number in 0 to 1"),
        ("first first --tolerance nan", "--tolerance=nan: must be a number in 0 to 1"),
        ("first firts", "firts: no such folder. Did you mean 'first'?"),
        ("first elsewhere/x", "elsewhere/x: no such folder."),
        ("first first/checkpoint.json", "first/checkpoint.json: is no folder"),
        ("first .", ".: is no checkpoint folder, it has no checkpoint.json"),
    ],
)
def test_arguments_that_are_wrong(refusal, arguments, said):
    assert said in refusal(*arguments.split())


def test_runs_that_have_nothing_in_common(refusal, workdir):
    record(workdir / "second", requests=(7,))
    assert "first holds 0 to 2, 4, second holds 7" in refusal("first", "second")
    CheckpointWriter(workdir / "third", tensors=False).begin(0, (1, 9, 3), {})
    assert "request 0: A and B had different prompts, from token 1 on" in refusal("first", "third")
    record(workdir / "fourth", names=("query",))
    said = refusal("first", "fourth", "--only", "key", "hidden")
    assert "no row of key, hidden at the same position and layer" in said


def test_tolerance_needs_tensors(refusal, workdir):
    record(workdir / "second", change={(0, "key", 0, 0): 1.0}, tensors=True)
    said = refusal("first", "second", "--tolerance", "0.1")
    assert "no tensors in first; record with backend.checkpoint_tensors=true" in said


def test_rows_of_another_model(refusal, workdir):
    writer = CheckpointWriter(workdir / "second", tensors=False)
    writer.begin(0, (1, 2, 3), {})
    writer.record("key", 0, 0, 0, torch.ones(3, WIDTH, 2))
    assert "a row is [4] in A and [4, 2] in B" in refusal("first", "second")


def damage(line):
    return lambda folder: _edit(folder / "request_000000.jsonl", line)


def _edit(path, line):
    first, _second, *rest = path.read_text().splitlines()
    path.write_text("\n".join([first, line, *rest, ""]))


def no_manifest(folder):
    (folder / "checkpoint.json").unlink()


def later_version(folder):
    (folder / "checkpoint.json").write_text('{"format": "ruler_bench checkpoint"}')


def fewer_digests(folder):
    path = folder / "request_000000.digests"
    path.write_bytes(path.read_bytes()[:-3])


def recorded_twice(folder):
    path = folder / "request_000000.jsonl"
    first, second, *rest = path.read_text().splitlines()
    path.write_text("\n".join([first, second, second, *rest, ""]))


def cut_tensor(folder):
    path = folder / "request_000000" / "000003.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def no_tensor(folder):
    (folder / "request_000000" / "000003.safetensors").unlink()


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (damage("{"), "request_000000.jsonl line 2: is damaged"),
        (damage("[]"), "request_000000.jsonl line 2: is damaged"),
        (damage('{"name": "key"}'), "request_000000.jsonl line 2: is damaged"),
        (no_manifest, "is no checkpoint folder"),
        (later_version, "its format version is None, and only 1 is known"),
        (fewer_digests, "its digests are missing"),
        (recorded_twice, "rotation: position 0 was recorded twice"),
        (cut_tensor, "000003.safetensors: is damaged"),
        (no_tensor, "000003.safetensors: cannot be read (No such file or directory)"),
    ],
)
def test_damaged_files(refusal, workdir, harm, said):
    record(workdir / "second", tensors=True)
    record(workdir / "third", tensors=True, change={(0, "value", 0, 0): 1.0})
    harm(workdir / "third")
    assert said in refusal("second", "third")


def test_help_says_what_it_is_for(cli):
    finished = cli("--help", entry=main)
    assert finished.status == 0
    assert "where two recorded runs of our engine part" in finished.out


def test_the_settings_are_kept_as_they_were(workdir):
    record(workdir / "run", run_settings={"cuts": (1, 2)})
    held = json.loads((workdir / "run" / "checkpoint.json").read_text())
    assert held["settings"] == {"cuts": [1, 2]}
    record(workdir / "run", run_settings={"cuts": (1, 2)})

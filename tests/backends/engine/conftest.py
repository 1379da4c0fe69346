"""Tiny models made on the spot, the packaged probe, and a short way to ask an engine."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from backends.base import Request

ROOT = Path(__file__).parents[3]
VOCABULARY = 160
POSITIONS = 512


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def under_interpreter():
    """Run files of tests with Triton's kernels run by its interpreter; return what pytest said.

    In a process of its own: Triton decides when it is imported whether it interprets.
    """
    pytest.importorskip("triton")

    def run(*files):
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *map(str, files)]
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("PYTEST_")  # those of a worker that runs this test
        }
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        found = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
        return found.stdout

    return run


@pytest.fixture
def fresh_kernels(monkeypatch):
    """Forget the engine's compiled Triton kernels; the list that it gives names those made since.

    Without it a kernel that a served request has to wait for may have been made by another test.
    """
    triton = pytest.importorskip("triton")
    for name, module in list(sys.modules.items()):
        if not name.startswith("backends.engine"):
            continue
        for kernel in vars(module).values():
            if isinstance(kernel, triton.runtime.JITFunction):
                kernel.device_caches.clear()
    compiled = []
    monkeypatch.setattr(
        triton.knobs.runtime,
        "jit_post_compile_hook",
        lambda **found: compiled.append(found["repr"]),
    )
    return compiled


@pytest.fixture(scope="session")
def probe():
    """The folder of the model that the project ships."""
    return ROOT / "ruler_bench" / "assets" / "probe"


@pytest.fixture(scope="session")
def save_model(tmp_path_factory):
    """Save a random model, with these settings of its configuration, and return its folder."""

    def save(architecture="LlamaForCausalLM", shard_size="5GB", dtype=torch.float32, **settings):
        torch.manual_seed(7)
        config = {
            "vocab_size": VOCABULARY,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": POSITIONS,
            "initializer_range": 0.25,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        model_class = getattr(transformers, architecture)
        model = model_class(model_class.config_class(**(config | settings))).eval().to(dtype)
        for name, tensor in model.named_parameters():
            if name.endswith("bias"):  # which transformers starts at zero
                torch.nn.init.normal_(tensor, std=0.2)
            elif name.endswith("norm.weight"):  # at one
                torch.nn.init.uniform_(tensor, 0.6, 1.4)
        folder = tmp_path_factory.mktemp("model")
        model.save_pretrained(folder, max_shard_size=shard_size)
        return folder

    return save


@pytest.fixture(scope="session")
def tiny(save_model):
    """The folder of a random model of three layers, four query heads and two key heads."""
    return save_model()


@pytest.fixture(scope="session")
def prompt():
    """Make a prompt of so many random token ids."""

    def make(tokens, seed=0, vocabulary=VOCABULARY):
        draw = random.Random(f"{tokens}-{seed}")
        return tuple(draw.randrange(vocabulary) for _ in range(tokens))

    return make


@pytest.fixture(scope="session")
def ask(prompt):
    """Ask an engine with a prompt, or with a random one of so many tokens."""

    def call(engine, tokens, new_tokens, stop=(), request_id=0):
        ids = prompt(tokens) if isinstance(tokens, int) else tuple(tokens)
        return engine.generate(Request(request_id, "", ids, new_tokens, tuple(stop)))

    return call

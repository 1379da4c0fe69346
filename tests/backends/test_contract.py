"""One contract over every backend: each file of configs/backend, on the probe, through the seam."""

import ast
import sys
from pathlib import Path

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from backends.base import Backend, PromptTooLong, Request, RequestError
from ruler_bench.config import config_dir, register_schemas
from ruler_bench.host import bound_factory, start_backend
from ruler_bench.model_files import model_folder, stop_token_ids
from ruler_bench.tasks import DataSpec, generate
from ruler_bench.testing import check_backend
from ruler_bench.tokenizer import load_tokenizer

ELSEWHERE = ("custom", "vllm")
"""What has no engine of its own, and what is tested with a stand-in: test_vllm.py."""
NAMES = sorted(
    one.stem for one in (config_dir() / "backend").glob("*.yaml") if one.stem not in ELSEWHERE
)
LENGTH, SHORT = 1024, 448
OF_SAMPLES = 768
"""Tokens of a sample: over a span of the attention, within the least context of every preset."""
LONG = {"offload_two_slots_32k"}
"""Built for a context of its own, whatever the samples."""
TELL_TOKENS = [name for name in NAMES if name not in ("oracle", "openai")]
CHECKED = {
    "oracle": (),
    "openai": (),
    "hf": ("backend.batch_size=2",),
    "gpu_only": (),
    "offload": ("backend.kvcache_block_size=128", "backend.chunk_tokens=256"),
}
"""Checked with all that the kit for other people's backends asks; further presets of our engine are
asked less."""
LESS = [name for name in NAMES if name not in CHECKED]
SERVER = Path(__file__).parent.parent / "servers" / "faulty.py"
NEEDED = {"openai": [f"backend.serve.command=[{sys.executable},{SERVER},--port,'{{port}}']"]}
"""What a backend cannot do without."""


def compose(*overrides):
    register_schemas()
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(config_dir().absolute()), version_base="1.3"):
        return hydra.compose("config", overrides=list(overrides))


@pytest.fixture(scope="module")
def samples():
    config = compose("task=niah_single_1")
    tokenizer = load_tokenizer(str(model_folder("package:probe")))
    from ruler_bench.config import task_spec

    spec = DataSpec(task_spec(config), OF_SAMPLES, 7, "base", tokenizer)
    return [(one, tuple(tokenizer.encode_prompt(one.prompt))) for one in generate(spec, 2)]


def settings_of(name, *overrides):
    overrides = (*NEEDED.get(name, ()), *overrides)
    return OmegaConf.to_container(compose(f"backend={name}", *overrides).backend, resolve=True)


def harness(length):
    return {
        "model_path": str(model_folder("package:probe")),
        "device": "cpu",
        "threads": 1,
        "max_model_len": length,
        "dtype": "auto",
    }


def start(name, length=LENGTH, *overrides):
    return start_backend(settings_of(name, *overrides), harness(length))


@pytest.fixture(scope="module", params=LESS)
def backend(request):
    engine = start(request.param)
    yield engine
    engine.close()
    engine.close()


def ask(number, sample, ids, limit=None):
    return Request(
        request_id=number,
        prompt=sample.prompt,
        prompt_token_ids=ids,
        max_new_tokens=limit or sample.tokens_to_generate,
        stop_token_ids=stop_token_ids(model_folder("package:probe")),
    )


@pytest.fixture(scope="module")
def answers(samples):
    """Answer the samples with an engine that serves nothing else, once for the same settings."""
    known = {}

    def answer(*chosen):
        if chosen not in known:
            name, *overrides = chosen
            engine = start(name, LENGTH, *overrides)
            known[chosen] = [engine.generate(ask(n, *one)) for n, one in enumerate(samples)]
            engine.close()
        return known[chosen]

    return answer


def text_of(generation, request):
    if generation.text is not None:
        return generation.text
    tokenizer = load_tokenizer(str(model_folder("package:probe")))
    return tokenizer.decode([i for i in generation.token_ids if i not in request.stop_token_ids])


@pytest.mark.parametrize("name", CHECKED)
def test_it_keeps_the_whole_contract(name):
    settings = settings_of(name, *CHECKED[name])
    build = bound_factory(settings, harness(SHORT))
    del settings["_target_"]
    report = check_backend(build, length=SHORT, asked=settings)
    states = {one.name: one.state for one in report.results}
    unchecked = {check for check, state in states.items() if state != "kept"}
    # Without token ids there is less to check.
    assert unchecked == (set() if name in TELL_TOKENS else {"limits", "stop"})


def test_it_is_a_backend_that_says_what_is_in_force(backend):
    assert isinstance(backend, Backend)
    assert backend.describe()


def test_every_setting_of_the_yaml_file_is_echoed(backend, request):
    name = request.node.callspec.params["backend"]
    asked = OmegaConf.to_container(compose(f"backend={name}").backend, resolve=True)
    assert set(asked) - {"_target_"} <= set(backend.describe())


@pytest.mark.parametrize("name", LESS)
def test_it_answers_and_stops(name, answers, samples):
    for number, (sample, ids) in enumerate(samples):
        request = ask(number, sample, ids)
        generation = answers(name)[number]
        assert sample.outputs[0] in text_of(generation, request)
        assert generation.finish_reason == "stop"
        if generation.token_ids is not None:
            assert generation.token_ids[-1] in request.stop_token_ids
            assert len(generation.logits_digest) == len(generation.token_ids)
            assert len(generation.top2_margin) == len(generation.token_ids)
            assert all(margin >= 0 for margin in generation.top2_margin)
        assert generation.prompt_tokens in (None, len(ids))
        assert generation.ttft_seconds is None or generation.ttft_seconds > 0


def test_the_limit_is_a_limit(backend, samples):
    sample, ids = samples[0]
    generation = backend.generate(ask(9, sample, ids, limit=2))
    if generation.token_ids is not None:
        assert len(generation.token_ids) == 2
        assert generation.finish_reason == "length"


def test_the_same_question_has_the_same_answer_after_others(backend, answers, samples, request):
    first = answers(request.node.callspec.params["backend"])[0]
    backend.generate(ask(21, *samples[1]))
    again = backend.generate(ask(22, *samples[0]))
    assert (first.token_ids, first.text, first.logits_digest) == (
        again.token_ids,
        again.text,
        again.logits_digest,
    )


@pytest.mark.parametrize(
    "backend", [name for name in LESS if name not in LONG], indirect=True, scope="module"
)
def test_a_prompt_that_does_not_fit_is_an_error_and_the_engine_goes_on(backend, samples):
    sample, ids = samples[0]
    with pytest.raises(PromptTooLong, match=str(LENGTH)) as caught:
        backend.generate(ask(0, sample, ids * 3))
    assert isinstance(caught.value, RequestError)
    assert backend.generate(ask(1, sample, ids)).finish_reason == "stop"


def test_all_engines_give_the_same_tokens_and_ours_the_same_bits(answers):
    found_by = {name: answers(name) for name in TELL_TOKENS}
    tokens = {name: [one.token_ids for one in found] for name, found in found_by.items()}
    assert {"gpu_only", "hf", "offload", "offload_layerwise"} <= set(tokens)
    for name, found in tokens.items():
        assert found == tokens["gpu_only"], name
    bits = {name: [one.logits_digest for one in found] for name, found in found_by.items()}
    assert bits["offload"] == bits["gpu_only"]
    # Layer-wise takes prompts whole and reads the history in one call.
    whole = ("backend.chunk_tokens=null", "backend.attend_tokens=null")
    plain = answers("gpu_only", *whole)
    assert bits["offload_layerwise"] == [one.logits_digest for one in plain]


def test_backends_import_nothing_from_the_harness():
    folder = Path(sys.modules["backends.base"].__file__).parent
    imports = [
        node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert len(imports) > 20
    assert not [name for name in imports if name and name.startswith("ruler_bench")]

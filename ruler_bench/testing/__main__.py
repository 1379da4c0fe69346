"""`python -m ruler_bench.testing backend=NAME`: does a backend keep the contract?"""

from __future__ import annotations

import sys

from omegaconf import DictConfig

from backends.base import ConfigurationError
from ruler_bench.cell import Cell
from ruler_bench.cli import JobResult, choices_and_overrides, print_error, run_app
from ruler_bench.command_line import USAGE_ERROR
from ruler_bench.config import cells
from ruler_bench.unread import unread_output

BROKEN = 1
HELP = """\
usage: python -m ruler_bench.testing backend=NAME [KEY=VALUE ...]

Builds the backend a few times and asks it small requests: order, limits, stop reasons,
determinism, release, error types, and what one request leaves for the next. Prints what holds
and what does not.

Keys are those of a run (python -m ruler_bench --help); backend, model, length, device and threads
matter here.

exit status: 0 the contract is kept, 1 it is not, 2 wrong usage
"""


@unread_output()
def main() -> int:
    """Check the backend of the command line in sys.argv and return the exit status.

    0 the contract is kept, 1 it is not, 2 wrong usage.
    """
    if {"-h", "--help"} & {*sys.argv[1:]}:
        print(HELP, end="")
        return 0
    try:
        results = run_app("config", job)
    except ConfigurationError as error:
        print_error(error)
        return USAGE_ERROR
    return max((one.status for one in results), default=0)


def job(config: DictConfig) -> JobResult:
    """Check one composed configuration, at each of its lengths."""
    status = 0
    for cell in cells(config, *choices_and_overrides()):
        status = max(status, check_cell(cell))
    return JobResult(status)


def check_cell(cell: Cell) -> int:
    """Check the backend of a cell and print what was checked; return the exit status."""
    from ruler_bench.bench import harness_arguments, least_context_tokens  # noqa: PLC0415
    from ruler_bench.host import TARGET, bound_factory  # noqa: PLC0415 (--help does not wait for it)
    from ruler_bench.model_files import model_folder  # noqa: PLC0415
    from ruler_bench.testing import BackendContractError, check_backend  # noqa: PLC0415
    from ruler_bench.tokenizer import load_tokenizer  # noqa: PLC0415

    model = model_folder(cell.model_path)
    context = least_context_tokens(cell, model, load_tokenizer(str(model)))
    harness = harness_arguments(cell, model, context)
    asked = {key: one for key, one in cell.backend_settings.items() if key != TARGET}
    build = bound_factory(cell.backend_settings, harness)
    try:
        report = check_backend(build, model=str(model), length=cell.length, asked=asked)
    except BackendContractError as error:
        print(error.report)
        return BROKEN
    print(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())

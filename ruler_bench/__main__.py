"""`python -m ruler_bench`: a run or a sweep, and the exit status."""

from __future__ import annotations

import sys

from backends.base import ConfigurationError
from ruler_bench.cli import asks_for_multirun, print_error, run_app, worst
from ruler_bench.command_line import GOES_ON, INTERRUPTED, USAGE_ERROR
from ruler_bench.job import job
from ruler_bench.launch_packages import check_launcher
from ruler_bench.sweep import run_sweep
from ruler_bench.unread import unread_output


@unread_output()
def main() -> int:
    """Run the command line in sys.argv and return the exit status."""
    try:
        is_sweep = any(asks_for_multirun(argument) for argument in sys.argv[1:])
        check_launcher(sys.argv[1:], is_sweep)
        if is_sweep:
            return run_sweep()
        results = run_app("config", job)
    except ConfigurationError as error:
        print_error(error)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print(GOES_ON, file=sys.stderr)
        return INTERRUPTED
    return worst([result.status for result in results])


if __name__ == "__main__":
    sys.exit(main())

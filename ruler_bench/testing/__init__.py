"""Does an engine keep the contract of backends/base.py? For the tests of whoever writes one.

    from ruler_bench.testing import check_backend

    def test_my_engine_keeps_the_contract():
        check_backend(lambda: MyEngine(model_path="...", max_model_len=512))

From the command line: `python -m ruler_bench.testing backend=my_engine length=512`.
docs/add_a_backend.md says what is checked.
"""

from ruler_bench.testing.check import check_backend
from ruler_bench.testing.report import BackendContractError, Report, Result

__all__ = ["BackendContractError", "Report", "Result", "check_backend"]

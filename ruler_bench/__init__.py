"""RULER long-context benchmark harness with pluggable backends.

From Python:

    from ruler_bench import compare, load_records

    frame = load_records("results")          # a line a record
    table = compare("results/a", "results/b")  # a line a cell: how b differs from a

Both are imported, with pandas, when they are first asked for: `import ruler_bench` stays light.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ruler_bench.frames import compare, load_records

__version__ = "0.1.0"
__all__ = ["compare", "load_records"]


def __getattr__(name: str) -> Any:
    """Import what is asked for."""
    if name in __all__:
        from ruler_bench import frames  # noqa: PLC0415 (pandas takes half a second)

        return getattr(frames, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

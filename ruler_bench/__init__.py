"""RULER long-context benchmark harness with pluggable backends."""

__version__ = "0.1.0"

"""The platform of this vLLM."""

from types import SimpleNamespace

current_platform = SimpleNamespace(device_type="cpu")

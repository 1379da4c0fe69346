"""Errors by the names that vLLM has; there that of a dead engine lies in vllm.v1.engine."""


class VLLMError(Exception):
    pass


class VLLMValidationError(VLLMError):
    pass


class EngineDeadError(VLLMError):
    pass

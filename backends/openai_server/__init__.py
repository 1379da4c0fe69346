"""Any server with the OpenAI HTTP interface as a backend: completions or chat, streamed.

`engine.py` is the backend; `connection.py` sends requests and says what went wrong, `answers.py`
reads what comes back, `serve.py` and `guard.py` start a server and end it with all its processes.
"""

from backends.openai_server.engine import OpenAIServer

__all__ = ["OpenAIServer"]

"""Servers of OpenAI's API that run already, such as `vllm serve`, behind one front end.

dynbus run servers.py --Server.url=http://127.0.0.1:8001
dynbus run servers.py -f servers.yaml

curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
  -d '{"model": "Qwen/Qwen3-0.6B", "messages": [{"role": "user", "content": "Hello"}]}'
"""

from dynbus.llm import Frontend, OpenAiWorker


class Front(Frontend, namespace="demo"):
    """Finds the server that has cached most of a request, and passes its answer on."""


class Server(OpenAiWorker, namespace="demo"):
    """One of the servers; it is there for as long as the server is."""

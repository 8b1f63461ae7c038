"""A model on engines of vLLM, which has to be installed: see docs/guides/vllm.md.

dynbus run engines.py -f engines.yaml --Engine.max_model_len=4096

curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
  -d '{"model": "qwen3", "messages": [{"role": "user", "content": "Hello"}]}'
"""

from dynbus.llm import Frontend, VllmWorker


class Front(Frontend, namespace="demo"):
    """Turns text into tokens, finds an engine, and turns its tokens into text."""


class Engine(VllmWorker, namespace="demo"):
    """An engine; what its own arguments do not name is an argument of vLLM."""

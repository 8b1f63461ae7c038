"""The same on engines of vLLM, which has to be installed with NIXL: see docs/guides/vllm.md.

dynbus run engines.py -f engines.yaml

curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
  -d '{"model": "qwen3", "messages": [{"role": "user", "content": "Hello"}]}'
"""

from dynbus.llm import Frontend, VllmWorker


class Front(Frontend, namespace="demo"):
    """Turns text into tokens, finds an engine that decodes, and turns its tokens into text."""


class Engine(VllmWorker, namespace="demo"):
    """An engine; the name of its node says whether it computes prompts or decodes."""

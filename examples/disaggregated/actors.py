"""Disaggregated serving: some engines compute prompts, others the tokens that follow.

dynbus run actors.py -f disaggregated.yaml

curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
  -d '{"model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": "Hello"}]}'

The blocks of a prompt go from one to the other by NIXL: dynbus[transfer]. `dynbus ps` and the page
at http://127.0.0.1:8000/ show how many prompts were handed over.
"""

from dynbus.llm import DisaggregatedWorker, Frontend


class Front(Frontend, namespace="demo"):
    """Turns text into tokens, finds an engine that decodes, and turns its tokens into text."""


class Engine(DisaggregatedWorker, namespace="demo"):
    """An engine; the name of its node says whether it computes prompts or decodes."""

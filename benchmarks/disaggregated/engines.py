"""The engines: `dynbus run engines.py -f nodes.yaml`."""

from dynbus.llm.disaggregated.worker import DisaggregatedWorker
from dynbus.llm.worker import ModelWorker


class Part(DisaggregatedWorker, namespace="bench"):
    """Computes prompts for others, or has others compute its prompts."""


class Whole(ModelWorker, namespace="bench"):
    """Computes prompts and tokens in the same steps."""

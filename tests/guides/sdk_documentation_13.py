"""Configuration as the command line of vLLM."""

import argparse

from dynbus.compat.sdk.lib.config import ServiceConfig

FlexibleArgumentParser = argparse.ArgumentParser


class AsyncEngineArgs:
    def __init__(self, model):
        self.model = model

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model", default="tiny")
        return parser

    @classmethod
    def from_cli_args(cls, args):
        return cls(args.model)


# fmt: off
def parse_vllm_args(service_name, prefix) -> AsyncEngineArgs:
    config = ServiceConfig.get_instance()
    vllm_args = config.as_args(service_name, prefix=prefix)
    parser = FlexibleArgumentParser()

    # Add custom arguments
    parser.add_argument("--router", type=str, choices=["random", "round-robin", "kv"], default="random")
    parser.add_argument("--remote-prefill", action="store_true")

    # Add VLLM's arguments
    parser = AsyncEngineArgs.add_cli_args(parser)

    # Parse both custom and VLLM arguments
    args = parser.parse_args(vllm_args)

    # Convert to engine arguments
    engine_args = AsyncEngineArgs.from_cli_args(args)

    # Add custom args to the engine args
    engine_args.router = args.router
    engine_args.remote_prefill = args.remote_prefill

    return engine_args
# fmt: on

if __name__ == "__main__":
    print(vars(parse_vllm_args("VllmWorker", "")))

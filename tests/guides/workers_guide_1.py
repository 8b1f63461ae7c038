"""A worker: it gives back the tokens that it is given."""

import asyncio

import uvloop

from dynbus.compat.llm import ModelInput, ModelType, register_llm
from dynbus.compat.runtime import DistributedRuntime, dynamo_worker


async def engine(token_ids):
    for token_id in token_ids:
        yield token_id


# fmt: off
# 1. Decorate a function to get the runtime
#
@dynamo_worker(static=False)
async def worker(runtime: DistributedRuntime):

    # 2. Register ourselves on the network
    #
    component = runtime.namespace("namespace").component("component")
    await component.create_service()
    model_path = "Qwen/Qwen3-0.6B" # or "/data/models/Qwen3-0.6B"
    model_input = ModelInput.Tokens # or ModelInput.Text if engine handles pre-processing
    model_type = ModelType.Chat # or ModelType.Chat | ModelType.Completions if model can be deployed on chat and completions endpoints
    endpoint = component.endpoint("endpoint")
    # Optional last param to register_llm is model_name. If not present derives it from model_path
    await register_llm(model_input, model_type, endpoint, model_path)

    # Initialize your engine here
    # engine = ...

    # 3. Attach request handler
    #
    await endpoint.serve_endpoint(RequestHandler(engine).generate)

class RequestHandler:

    def __init__(self, engine):
        self.engine = engine

    async def generate(self, request):
        # Call the engine
        # yield result dict
        async for token_id in self.engine(request["token_ids"]):
            yield {"token_ids": [token_id]}
        yield {"token_ids": [], "finish_reason": "stop"}

if __name__ == "__main__":
    uvloop.install()
    asyncio.run(worker())
# fmt: on

"""A service that calls another one, and has an engine."""

from pydantic import BaseModel
from service_b import ServiceB

from dynbus.compat.sdk import async_on_shutdown, async_on_start, depends, dynamo_endpoint, service


class ChatCompletionRequest(BaseModel):
    messages: list[dict[str, str]]


class Engine:
    def __init__(self, model_name):
        self.model_name = model_name

    async def generate(self, request):
        return {"model": self.model_name, "text": request["prompt"].upper()}

    async def shutdown(self):
        pass


async def initialize_model_engine(model_name):
    return Engine(model_name)


# fmt: off
@service(dynamo={"enabled": True, "namespace": "dynamo"}, resources={"gpu": 1})
class ServiceA:
    # Define service dependencies
    service_b = depends(ServiceB)

    def __init__(self, model_name="meta-llama/Llama-3.1-8B-Instruct"):
        self.model_name = model_name
        self.engine = None

    @async_on_start
    async def async_init(self):
        # Initialize resources that require async operations
        self.engine = await initialize_model_engine(self.model_name)
        print(f"ServiceA initialized with model: {self.model_name}")

    @async_on_shutdown
    async def async_shutdown(self):
        # Clean up resources
        if self.engine:
            await self.engine.shutdown()
            print("ServiceA engine shut down")

    @dynamo_endpoint()
    async def generate(self, request: ChatCompletionRequest):
        # Call dependent service
        processed_request = await self.service_b.preprocess(request)

        # Use the engine to generate a response
        response = await self.engine.generate(processed_request)
        return response
# fmt: on

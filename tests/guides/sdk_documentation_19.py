"""A processor that can work with a router or without."""

from vllm_worker import VllmWorker

from dynbus.compat.sdk import depends, dynamo_endpoint, service


class ProcessMixIn:
    def prepare(self, request):
        return {"prompt": request["text"].upper()}


@service(dynamo={"namespace": "dynamo"})
class Router:
    @dynamo_endpoint()
    async def generate(self, request):
        yield "worker"


@service(dynamo={"namespace": "dynamo"})

# fmt: off
class Processor(ProcessMixIn):
    """
    vLLM pre and post processing
    """

    worker = depends(VllmWorker)
    router = depends(Router)

    # logic for processing a request based on router or worker
    # fmt: on

    @dynamo_endpoint()
    async def generate(self, request):
        async for word in self.worker.generate(self.prepare(request)):
            yield word

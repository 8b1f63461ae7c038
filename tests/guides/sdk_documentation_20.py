"""A processor of which a run starts the router alone."""

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
class Processor(ProcessMixIn):
    """
    vLLM pre and post processing
    """

    worker = depends(VllmWorker)
    router = depends(Router)

    # logic for processing a request based on router or worker

    @dynamo_endpoint()
    async def generate(self, request):
        async for word in self.router.generate(self.prepare(request)):
            yield word


# fmt: off
Processor.link(Router)
# fmt: on

"""A client of a service that is no dependency."""

from vllm_worker import VllmWorker

from dynbus.compat.sdk import async_on_start, dynamo_context, dynamo_endpoint, service


@service(dynamo={"namespace": "dynamo"})
class Processing:
    @async_on_start
    async def connect(self):
        # fmt: off
        runtime = dynamo_context["runtime"]
        comp_ns, comp_name = VllmWorker.dynamo_address() # dynamo://{namespace}/{name}
        print(f"[Processor] comp_ns: {comp_ns}, comp_name: {comp_name}")
        self.worker_client = (
            await runtime.namespace(comp_ns)
            .component(comp_name)
            .endpoint("generate")
            .client()
        )

    # fmt: on

    @dynamo_endpoint()
    async def process(self, request):
        async for word in await self.worker_client.generate(request):
            yield word.data()

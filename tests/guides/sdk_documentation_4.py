"""A dependency, and the client that it is."""

from service_b import ServiceB

from dynbus.compat.sdk import depends, dynamo_context, dynamo_endpoint, service


@service(dynamo={"namespace": "dynamo"})
class Asking:
    # So that the run has it.
    service_b = depends(ServiceB)

    @dynamo_endpoint()
    async def ask(self, data):
        runtime = dynamo_context["runtime"]

        # fmt: off
        # What happens internally when you use depends(ServiceB)
        service_b = await runtime.namespace("dynamo").component("ServiceB").endpoint("preprocess").client()

        # But with Dynamo SDK, you simply write:
        service_b = depends(ServiceB)

        # And then call methods directly:
        result = await service_b.preprocess(data)
        # fmt: on

        return result

"""A service of two GPUs, ten cores and 20 GiB."""

from dynbus.compat.sdk import dynamo_endpoint, service


# fmt: off
@service(
    dynamo={
        "enabled": True,
        "namespace": "dynamo",
    },
    resources={"gpu": 2, "cpu": "10", "memory": "20Gi"},
    workers=1,
)
# fmt: on

class Large:
    @dynamo_endpoint()
    async def ask(self, request):
        return request

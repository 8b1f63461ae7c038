"""What each instance needs of its machine."""

from dynbus.compat.sdk import dynamo_endpoint, service


# fmt: off
@service(
    resources={
        "cpu": "10",
        "memory": "20Gi",
        "gpu": "1",  # If needed
    }
)
# fmt: on

class Needy:
    @dynamo_endpoint()
    async def ask(self, request):
        return request

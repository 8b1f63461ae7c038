"""An endpoint that logs what goes wrong."""

import logging

from dynbus.compat.sdk import dynamo_endpoint, service

logger = logging.getLogger(__name__)


@service(dynamo={"namespace": "demo"})
class Divider:
    @dynamo_endpoint()
    async def divide(self, request):
        # fmt: off
        try:
            # Your logic here
            return {"divided": 12 // request["by"]}
        except Exception as e:
            logger.error(f"Error processing request: {e}")
            raise


# fmt: on

"""A service that reads its configuration by itself."""

from dynbus.compat.sdk import service
from dynbus.compat.sdk.lib.config import ServiceConfig


# fmt: off
class MyService:
    def __init__(self):
        config = ServiceConfig.get_instance()

        # Get with default value
        self.model_name = config.get("MyService", {}).get("model_name", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B")
        self.temperature = config.get("MyService", {}).get("temperature", 0.7)

        # Require a config value (raises error if missing)
        self.api_key = config.require("MyService", "api_key")

        # Get all config for this service
        all_my_config = config.get("MyService", {})
# fmt: on

MyService = service(dynamo={"namespace": "prod"})(MyService)

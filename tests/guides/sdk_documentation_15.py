"""What a program reads of the variable by itself."""

import json
import os
from typing import Optional


class DynamoService:
    # fmt: off
    def _get_service_args(self, service_name: str) -> Optional[dict]:
        """Get ServiceArgs from environment config if specified"""
        config_str = os.environ.get("DYNAMO_SERVICE_CONFIG")
        if config_str:
            config = json.loads(config_str)
            service_config = config.get(service_name, {})
            return service_config.get("ServiceArgs")
        return None


# fmt: on

if __name__ == "__main__":
    print(DynamoService()._get_service_args("MyService"))

"""Values in the decorator and in the constructor, which a run may override."""

from dynbus.compat.sdk import service


# fmt: off
@service(
    dynamo={"enabled": True, "namespace": "prod"},
    resources={"gpu": 2, "cpu": "4", "memory": "16Gi"},
    workers=2,
)
class MyService:
    def __init__(self, model_name="deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", temperature=0.7):
        self.model_name = model_name
        self.temperature = temperature
# fmt: on

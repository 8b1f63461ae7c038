"""A hook of the start."""

from dynbus.compat.sdk import async_on_start, dynamo_endpoint, service


async def connect_to_db():
    return "db"


async def load_tokenizer():
    return "tokenizer"


async def initialize_engine(model):
    return f"engine of {model}"


@service(dynamo={"namespace": "demo"})
class Prepared:
    def __init__(self, model="tiny"):
        self.model = model

    # fmt: off
    @async_on_start
    async def async_init(self):
        # Perfect for operations that need to be awaited
        self.db = await connect_to_db()
        self.tokenizer = await load_tokenizer()
        self.engine = await initialize_engine(self.model)
    # fmt: on

    @dynamo_endpoint()
    async def has(self, request):
        return [self.db, self.tokenizer, self.engine]

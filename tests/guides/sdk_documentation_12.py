"""Configuration as the command line of a library."""

import argparse

from dynbus.compat.sdk.lib.config import ServiceConfig


class MyLibArgumentParser(argparse.ArgumentParser):
    def __init__(self):
        super().__init__()
        self.add_argument("--option1")
        self.add_argument("--flag2", action="store_true")
        self.add_argument("--option3")


# fmt: off
def setup_my_lib():
    config = ServiceConfig.get_instance()

    # Get all MyService config with prefix "lib_" as CLI args
    cli_args = config.as_args("MyService", prefix="lib_")
    # Returns: ["--option1", "value1", "--flag2", "--option3", "value3"]

    # Pass to an external library's argument parser
    lib_parser = MyLibArgumentParser()
    lib_args = lib_parser.parse_args(cli_args)
    return lib_args
# fmt: on

if __name__ == "__main__":
    print(setup_my_lib())

"""The subcommands of `dynbus` about KV caches."""

"""Subcommands of `dynbus lab` about calls: they measure them, and break what they run on."""

"""Commands that need no actor: `ps`, `doctor` and `version`."""

"""The systems under measurement, one module each; see `system.System`."""

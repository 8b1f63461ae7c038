"""Disaggregated serving: prompts are computed by other instances than the output."""

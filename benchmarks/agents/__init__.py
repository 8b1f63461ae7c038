"""Agents that call tools: how much of their conversations is computed again."""

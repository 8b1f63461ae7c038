"""Engines that serve language models, and the replay of their traffic."""

"""Batches: files of requests, whose lines are asked beside what is interactive, each done once."""

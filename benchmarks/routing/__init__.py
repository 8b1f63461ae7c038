"""Routing policies on a trace, and the simulator beside Dynamo's."""

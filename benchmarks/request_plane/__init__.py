"""Calls and streams of dynbus against bare nats-py, Dynamo, grpc.aio and Ray Serve."""

"""The radix index against Dynamo's `RadixTree`: events, look-ups, memory."""

"""`dynamo.sdk.lib`."""

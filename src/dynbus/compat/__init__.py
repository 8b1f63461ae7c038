"""The names that programs written for Dynamo import, over dynbus's own: see docs/from-dynamo.md."""

"""The page of the front end: a chat, the models, their instances, and where each request went."""

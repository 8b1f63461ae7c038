"""Anthropic's messages as data: requests as chats, and answers, events and errors."""

"""OpenAI's interface as data: requests, answers and errors, without HTTP."""

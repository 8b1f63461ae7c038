"""A small engine for real models: the Llama family on numpy or PyTorch."""

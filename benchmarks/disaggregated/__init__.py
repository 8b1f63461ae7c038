"""A prefill and a decode engine on a core each, against engines that do both."""

"""The text of a model read: what it reasons, says, and calls. Pure: no I/O, no clock."""

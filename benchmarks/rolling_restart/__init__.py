"""What callers see of a rolling restart."""

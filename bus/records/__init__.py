"""What JetStream keeps: the records of instances, leases, and objects."""

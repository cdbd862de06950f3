"""What `scripts/load.py` consists of: a client, a server of its own, and faults."""

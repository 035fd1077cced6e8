"""What a proposed task must pass before anyone trains on it; it runs on the host, outside the proposer's reach."""

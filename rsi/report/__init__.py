"""What a run did, for people: the pool so far."""

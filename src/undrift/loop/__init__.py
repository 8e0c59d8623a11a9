"""One step for both loops; epochs, streams, gathering, guarding and resuming."""

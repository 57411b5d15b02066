"""headrace in front of each worker, seen by its clients."""

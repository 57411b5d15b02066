"""headrace in front of real workers, as a trainer uses it: what comes back is what the worker would have said by itself."""

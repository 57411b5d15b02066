"""headrace: the path of a call, the fleet, and what plugins may use."""

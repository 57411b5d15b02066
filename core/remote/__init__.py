"""Commands that speak to a running headrace: what its HTTP routes offer, for a person at a terminal."""

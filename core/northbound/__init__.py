"""The HTTP routes: parse, run the path, reply."""

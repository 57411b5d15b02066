"""The workers that headrace can reach, and what it knows of them."""

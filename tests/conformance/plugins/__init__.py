"""What the plugins do, through a real headrace in front of each kind of worker."""

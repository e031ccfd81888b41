"""What makes lanes faster or slower while they are in use: better paths, several networks, more streams, limits."""

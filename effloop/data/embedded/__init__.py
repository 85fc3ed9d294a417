"""The photographs that travel with the package, and the script that made their file."""

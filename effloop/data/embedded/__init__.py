"""The photographs that are part of the package."""

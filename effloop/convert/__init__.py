"""Offline work on datasets: re-encode, write, verify."""

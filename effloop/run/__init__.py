"""One run, in this process or in ranks."""

"""One module per storage format: its source, its writer, or both; imported when the format is chosen."""

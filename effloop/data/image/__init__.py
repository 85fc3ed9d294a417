"""What an image file's bytes say, and its pixels' size."""

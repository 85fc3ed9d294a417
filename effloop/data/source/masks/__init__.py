"""Images with a mask each, in files of their own."""

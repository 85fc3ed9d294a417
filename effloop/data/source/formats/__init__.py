"""One file a storage format."""

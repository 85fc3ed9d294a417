"""How datasets lie in files: columns, records, shards."""

"""How datasets are stored in files: columns, indexes, records, shards."""

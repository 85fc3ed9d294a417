"""`effloop audit`: what is wrong with a dataset."""

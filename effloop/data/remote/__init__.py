"""Remote datasets: listed once, fetched whole files at a time into a folder of this machine, and read there."""

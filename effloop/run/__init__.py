"""One run, in this process or in ranks; and sweeps, whose jobs are runs."""

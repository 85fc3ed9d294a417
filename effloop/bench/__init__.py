"""What costs what, beside baselines."""

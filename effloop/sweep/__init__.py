"""Many runs: planned, isolated from each other, resumed."""

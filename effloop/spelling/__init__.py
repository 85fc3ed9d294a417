"""What a command line's words mean, and what a misspelt one probably does; without torch, which takes seconds."""

"""The corridor that a sample goes down, one way: source, decode, augment, batch, device."""

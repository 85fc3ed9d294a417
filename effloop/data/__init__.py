"""The data path of training: source, decode, augment, batch, device."""

"""What a run takes of a GPU that isn't here: memory, time, money; from a training step on tensors without memory."""

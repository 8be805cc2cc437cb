"""Learning without networking: packing, advantages, losses, optimiser, update, checkpoint, warm start, recipes."""

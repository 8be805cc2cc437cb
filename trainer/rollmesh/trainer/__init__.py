"""Learning without networking: packing, estimators, losses, optimizer, update, checkpoint, recipes."""

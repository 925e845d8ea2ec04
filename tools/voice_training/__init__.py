"""Stages of the training, each `train(work, seconds, device)` of a module; `__main__` has the recipe."""

"""Training of the demo voice. Each stage is `train(work, seconds, device)` of a module; `__main__` has the recipe."""

"""Stages of scripts/train_demo_voice.py, each `train(work, seconds, device)` of a module; see there for the recipe."""

"""CosyVoice3's causal HiFT over streams."""

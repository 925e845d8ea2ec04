"""CosyVoice3's flow over streams."""

"""CosyVoice2's UNet flow over streams, which keeps no caches."""

"""CosyVoice2's UNet flow over streams: its fused estimator."""

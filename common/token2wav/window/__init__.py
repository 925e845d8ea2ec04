"""Streams of flows that compute a stream's window again for every chunk: CosyVoice2's UNet and CosyVoice3's DiT."""

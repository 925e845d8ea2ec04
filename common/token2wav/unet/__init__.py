"""CosyVoice2's UNet flow over streams: the window of a stream, its solve, CUDA graphs."""

"""Speech tokens to audio: `service` owns the streams and their thread, `engine` the networks that render them."""

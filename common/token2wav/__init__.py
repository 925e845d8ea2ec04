"""Speech tokens to audio: `engine` renders the chunks of one stream, `service` owns all streams and their thread."""

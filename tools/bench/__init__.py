"""Parts of bench_token2wav: the load that it puts on the service, and its picture."""

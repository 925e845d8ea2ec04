"""What protects the speech service: limits before a request, keys, origins."""

"""What CI requires of the demo voice."""

# Of a few sentences, with a margin: the whole set's figures are in docs/results/quality.md.
OF_THE_DEMO_VOICE = ("failed<=0", "silent<=0", "clipped<=0", "error_rate<=0.2", "dnsmos>=2.3", "similarity>=0.85")

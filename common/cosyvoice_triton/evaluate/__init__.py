"""Speech of a checkpoint, judged: error rate, DNSMOS, speaker similarity, speed, silence and clipping."""

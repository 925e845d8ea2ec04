"""How well a voice speaks: what is heard in it, its lengths, its joints, whom it sounds like."""

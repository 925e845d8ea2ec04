"""The networks themselves: flows (`flow`) and vocoders (`hift`), with strict loaders of the official files."""

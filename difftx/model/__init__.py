"""What the network is."""

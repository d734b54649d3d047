"""How the network learns."""

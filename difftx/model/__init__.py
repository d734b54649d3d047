"""The network: layers, attention architectures, the decoder, and counts of parameters and FLOPs."""

"""The network: layers, attention architectures and the decoder, with their counts of parameters and FLOPs."""

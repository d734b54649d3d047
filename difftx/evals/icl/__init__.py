"""The suite icl: in-context learning by demonstrations."""

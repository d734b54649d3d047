"""The suite `icl`: in-context learning from demonstrations."""

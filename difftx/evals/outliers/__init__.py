"""The suite `outliers`: the largest attention logits and hidden states of a model."""

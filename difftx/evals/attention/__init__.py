"""The suite `attention`: statistics and pictures of attention weights."""

"""The suite `attention`: statistics and charts of attention weights."""

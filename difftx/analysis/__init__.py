"""Maths on what runs measured, without input or output."""

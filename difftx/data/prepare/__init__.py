"""Preparation of token stores from text."""

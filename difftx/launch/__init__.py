"""Estimate the cost of training on devices that are not attached, and run sweeps of many training runs."""
